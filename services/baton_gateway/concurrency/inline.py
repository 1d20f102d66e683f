"""A time limit for work that runs in the event loop."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

INLINE_S = 0.03  # well below the time for which one request may hold the event loop

_deadline: ContextVar[float] = ContextVar("inline_deadline", default=float("inf"))


class TooLongInlineError(Exception):
    """The work takes longer than the event loop may be held. It must be repeated in a thread."""


@contextmanager
def inline_limit() -> Iterator[None]:
    """Limit the time of the `with` statement. Work in it that checks inline_deadline() raises TooLongInlineError."""
    token = _deadline.set(time.monotonic() + INLINE_S)
    try:
        yield
    finally:
        _deadline.reset(token)


def inline_deadline() -> float:
    """Return when the current work must end, on the monotonic clock. It is infinite for work that may take long."""
    return _deadline.get()
