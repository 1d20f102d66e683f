"""Runs work in threads when it would block the event loop. Tenants take turns for the threads."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from ..errors import client_gone, overloaded
from .fair_queue import FairQueue
from .inline import TooLongInlineError, inline_limit

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

# Work on at most this many bytes of text takes less time than handing it to a thread.
INLINE_BYTES = 2048
LONG_BYTES = 65_536  # work on more text keeps a thread busy for tens of milliseconds
MAX_WAITING = 1024  # pieces of work
MAX_WAITING_BYTES = 64 * 1024 * 1024  # one thread needs about ten seconds for this much text


@dataclass(frozen=True, slots=True)
class Client:
    """The client of a piece of work. receive: ASGI's callable, which reports a disconnect; None = not available."""

    tenant: str = ""
    weight: float = 1.0
    receive: Receive | None = None


@dataclass(eq=False, slots=True)
class _Job(Generic[T]):
    work: Callable[[], T]
    size: int
    client: Client
    waits: bool = True  # False when the job has a thread or has left the queue
    done: "asyncio.Future[T]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """A few threads, and a fair queue of the work that waits for them.

    The queue shares the threads among tenants by weight and counts bytes of text. Long work leaves one thread free for
    short work of any tenant. When too much waits, the tenant with the longest queue loses its newest work. Work whose
    client disconnects leaves the queue.
    """

    def __init__(self, threads: int, max_waiting: int = MAX_WAITING) -> None:
        """max_waiting: pieces of work that may wait."""
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="turns")
        self._free = threads
        self._free_for_long = max(threads - 1, 1)
        self._queue: FairQueue[_Job[Any]] = FairQueue(max_waiting)
        self._waiting_bytes = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def run(self, work: Callable[[], T], size: int, client: Client) -> T:
        """Call `work` and return its result. Small work runs at once, in the event loop.

        Small work that turns out to take long raises TooLongInlineError, and is repeated in a thread.
        size: bytes of text that the work processes. Raises what `work` raises, ApiError 503 when too much work waits,
        and ApiError 499 when the client disconnects.
        """
        if size <= INLINE_BYTES:
            try:
                with inline_limit():
                    return work()
            except TooLongInlineError:
                size = LONG_BYTES + 1
        job = _Job(work, size, client)
        if self._free and not self._queue and self._may_start(job):
            # Awaiting the thread's own future saves one iteration of the event loop.
            job.done = self._start(job)
            return await job.done
        self._push(job)
        try:
            return await (
                self._result_unless_disconnected(job) if job.waits and client.receive is not None else job.done
            )
        finally:
            if job.waits:
                self._leave(job)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _push(self, job: _Job[Any]) -> None:
        self._waiting_bytes += job.size
        pushed_out = self._queue.push(job.client.tenant, job, job.size, job.client.weight)
        if pushed_out is not None:
            self._refuse(pushed_out)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._refuse(self._queue.push_out())
        self._start_waiting()

    def _refuse(self, job: _Job[Any]) -> None:
        self._no_longer_waits(job)
        if not job.done.done():
            job.done.set_exception(
                overloaded("The server is busy: too much text waits to be processed. Try again later.")
            )

    def _leave(self, job: _Job[Any]) -> None:
        """Remove a job from the queue when its request has ended."""
        if self._queue.remove(job.client.tenant, job):
            self._no_longer_waits(job)

    def _no_longer_waits(self, job: _Job[Any]) -> None:
        job.waits = False
        self._waiting_bytes -= job.size

    def _start_waiting(self) -> None:
        """Start waiting jobs on the free threads, in the order of the fair queue."""
        while self._free and (job := self._queue.pop(self._may_start)) is not None:
            self._no_longer_waits(job)
            self._start(job)

    def _start(self, job: _Job[Any]) -> "asyncio.Future[Any]":
        job.waits = False
        self._free -= 1
        self._free_for_long -= job.size > LONG_BYTES
        future = asyncio.get_running_loop().run_in_executor(self._executor, job.work)
        future.add_done_callback(partial(self._finished, job))
        return future

    def _may_start(self, job: _Job[Any]) -> bool:
        return self._free_for_long > 0 or job.size <= LONG_BYTES

    def _finished(self, job: _Job[Any], future: "asyncio.Future[Any]") -> None:
        self._free += 1
        self._free_for_long += job.size > LONG_BYTES
        if future.cancelled():
            job.done.cancel()
        elif (error := future.exception()) is None:
            if not job.done.done():
                job.done.set_result(future.result())
        elif not job.done.done():
            job.done.set_exception(error)
        self._start_waiting()

    async def _result_unless_disconnected(self, job: _Job[T]) -> T:
        """Wait for the result. Raises ApiError 499 when the client disconnects first."""
        assert job.client.receive is not None
        disconnect = asyncio.ensure_future(_disconnected(job.client.receive))
        try:
            await asyncio.wait((job.done, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not job.done.done():
                job.done.cancel()
                raise client_gone()
            return job.done.result()
        finally:
            disconnect.cancel()
            job.done.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
