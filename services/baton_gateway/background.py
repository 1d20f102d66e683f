"""Tasks that run as long as the gateway does. One that fails is started again, and its failures are counted."""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable

from prometheus_client import Counter

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 10.0
_STEADY_S = 60.0  # a task that ran for so long is started again at once when it fails

# Of this process; every gateway in it exposes the same one.
FAILURES = Counter(
    "baton_gateway_background_task_failures",
    "Failures of tasks that run as long as the gateway does; each was started again.",
    ["task"],
    registry=None,
)


def keep_running(name: str, run: Callable[[], Awaitable[None]]) -> "asyncio.Task[None]":
    """Start a task that never ends by itself; cancel it to stop it.

    name: of its kind, one of a few words. run: is called again, after a pause that grows, whenever it raises an
    exception or returns.
    """
    FAILURES.labels(name)
    return asyncio.create_task(_run(name, run), name=name)


async def _run(name: str, run: Callable[[], Awaitable[None]]) -> None:
    retry_s = _FIRST_RETRY_S
    while True:
        began = time.monotonic()
        error: Exception | None = None
        try:
            await run()
        except Exception as failure:
            error = failure
        if time.monotonic() - began >= _STEADY_S:
            retry_s = _FIRST_RETRY_S
        FAILURES.labels(name).inc()
        _log_failure(name, error, retry_s)
        await asyncio.sleep(retry_s)
        retry_s = min(2 * retry_s, _LAST_RETRY_S)


def _log_failure(name: str, error: Exception | None, retry_s: float) -> None:
    """Log where a task failed, but not the exception's text: it may quote what somebody sent."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    log.error(
        "background task failed",
        extra={
            "event": "background_task_failed",
            "task": name,
            "exception_type": type(error).__name__ if error is not None else None,
            "stack": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
            "retry_s": retry_s,
        },
    )
