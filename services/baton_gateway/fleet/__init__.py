"""Finds the pods, keeps connections to them, and knows which models they serve."""
