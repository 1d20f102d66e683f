"""Errors that make a measurement impossible."""


class BenchError(Exception):
    """A measurement is impossible. The message is shown to the user."""
