"""Reads what models write while it arrives: the parts of an answer, and the parts of reading that all formats share."""
