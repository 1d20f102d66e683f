"""Calls of functions in the text of a model."""
