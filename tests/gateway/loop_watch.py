"""How long the event loop is held by one of its callbacks, or by a thread that does not let it go on."""

import asyncio
import asyncio.events
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MOST_S = 0.1  # on a core that has its caches and its clock for itself
USUAL_S = 0.012  # that such a core takes for the loop of `slowness`
TRIES = 8
TICK_S = 0.002
_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # of Linux: time on a processor, time of waiting for one, in ns


@dataclass
class Held:
    """Times in seconds of processor time, so that what else the machine does makes no difference.

    callback: the most that one callback took. late: the most that the process worked between two turns
    of the loop, of whichever thread, without the time for which the loop's thread waited for a processor.
    """

    callback: float = 0.0
    late: float = 0.0
    where: str = ""


def slowness() -> float:
    """Return how many times longer than usual a core takes now, as other guests of the machine use it, too."""
    began = time.thread_time()
    total = 0
    for number in range(200_000):
        total += number
    return max(1.0, (time.thread_time() - began) / USUAL_S)


def waited() -> float:
    """Return for how many seconds of its life this thread waited for a processor; 0 where the system does not say."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


@contextmanager
def watched(held: Held) -> Iterator[None]:
    """Note in `held` for how long the running loop is held meanwhile."""
    run = asyncio.events.Handle._run
    loop = asyncio.get_running_loop()
    wall, cpu, queued = time.perf_counter(), time.process_time(), waited()

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        took = time.thread_time() - began
        if took > held.callback:
            held.callback, held.where = took, _where(handle)

    def tick() -> None:
        nonlocal ticker
        measure()
        ticker = loop.call_later(TICK_S, tick)

    def measure() -> None:
        nonlocal wall, cpu, queued
        now_wall, now_cpu, now_queued = time.perf_counter(), time.process_time(), waited()
        held.late = max(held.late, min(now_wall - wall, now_cpu - cpu) - (now_queued - queued) - TICK_S)
        wall, cpu, queued = now_wall, now_cpu, now_queued

    ticker = loop.call_later(TICK_S, tick)
    asyncio.events.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        ticker.cancel()
        measure()
        asyncio.events.Handle._run = run  # type: ignore[method-assign]


async def not_held(request: Callable[[], Awaitable[T]]) -> T:
    """Make a request, and assert that it does not hold the loop for too long.

    It is made again if it seems to: garbage that other tests have left may be collected in the middle of it.
    """
    before = 1.0
    for _ in range(TRIES):
        held = Held()
        with watched(held):
            answer = await request()
        longest = max(held.callback, held.late)
        # To measure the core's slowness takes longer than most requests, so it is measured only where it matters.
        if longest <= MOST_S or longest <= MOST_S * max(before, slowness()):
            return answer
        gc.collect()
        gc.freeze()
        before = slowness()
    raise AssertionError(f"the loop was held for {held}")


def _where(handle: asyncio.Handle) -> str:
    callback = getattr(handle, "_callback", None)
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return repr(callback)
    coroutine = task.get_coro()
    code = getattr(coroutine, "cr_code", None)
    return f"{code.co_filename}:{code.co_name}" if code is not None else repr(coroutine)
