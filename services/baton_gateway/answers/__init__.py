"""The text of each choice, and the JSON that clients get."""
