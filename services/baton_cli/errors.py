"""Errors for the user: `baton` prints their text instead of a traceback and exits with the class's exit_code."""


class UserError(Exception):
    """The command cannot be carried out."""

    exit_code = 1


class BadSetting(UserError):
    """A flag or environment variable is invalid, so a retry would fail too."""

    exit_code = 2
