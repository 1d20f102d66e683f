"""Tasks that run as long as the gateway does. One that fails is started again, and its failures are counted."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from prometheus_client import Counter

from .crash_log import log_crash

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 10.0
_CANCEL_AGAIN_S = 0.1
_STEADY_S = 60.0  # a task that ran this long before it failed is retried after _FIRST_RETRY_S

# One counter for the process: every gateway in the process exposes it.
FAILURES = Counter(
    "baton_gateway_background_task_failures",
    "Failures of tasks that run as long as the gateway does; each was started again.",
    ["task"],
    registry=None,
)


def keep_running(name: str, run: Callable[[], Awaitable[None]]) -> "asyncio.Task[None]":
    """Start a task that never ends by itself. `stop_running` ends it.

    name: the kind of task, one of a few words. run: it is called again, after a growing backoff, whenever it raises an
    exception or returns.
    """
    FAILURES.labels(name)
    return asyncio.create_task(_run(name, run), name=name)


async def stop_running(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait for its end.

    The Redis client sends within asyncio.wait_for. In Python 3.11, wait_for loses a cancellation that arrives together
    with its result. So the task is cancelled again until it has ended.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)


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
        extra = {"event": "background_task_failed", "task": name, "retry_s": retry_s}
        if error is None:
            log.error("background task ended", extra=extra)
        else:
            log_crash("background task failed", error, **extra)
        await asyncio.sleep(retry_s)
        retry_s = min(2 * retry_s, _LAST_RETRY_S)
