"""Turns generated tokens into the text of each choice, and writes the JSON that clients get."""
