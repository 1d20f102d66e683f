"""Reads the text of models while it arrives: the parts of an answer, and the base of the readers of all formats."""
