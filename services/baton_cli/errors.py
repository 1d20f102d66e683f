"""Errors whose text is for the user: `baton` prints it instead of a traceback and exits with the class's code."""


class UserError(Exception):
    """What was asked for cannot be done here."""

    exit_code = 1


class BadSetting(UserError):
    """A flag or environment variable that cannot be used: another attempt ends the same."""

    exit_code = 2
