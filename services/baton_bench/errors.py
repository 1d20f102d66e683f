"""What makes a measurement impossible."""


class BenchError(Exception):
    """Its text is for the user."""
