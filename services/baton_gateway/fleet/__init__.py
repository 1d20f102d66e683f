"""Finds the pods, keeps connections to them, and lists the models that they serve."""
