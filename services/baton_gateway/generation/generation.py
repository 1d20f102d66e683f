"""Runs the prompts of one HTTP request on the pods."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

from baton_proto import serving_pb2 as pb

from ..concurrency.pace import SLICE_S
from ..errors import ApiError, overloaded
from ..fleet.fleet import Fleet
from ..routing.admission import AdmissionRequest
from ..settings import GatewaySettings
from .answer_memory import AnswerMemory, size_of
from .prompt import Prompt
from .unread import Unread

_SLOW_S = 3.0  # a client that takes no bytes, and has not been up to date for this long, is too slow for a full tenant


class ClientGoneError(Exception):
    """The client closed its connection."""


class Generation:
    """Sends one or more prompts to pods and gathers their tokens for one reader.

    Choice c of prompt p has the number p * n + c. When a decode pod is lost, its choices continue on another.
    """

    def __init__(
        self,
        fleet: Fleet,
        prompts: Sequence[Sequence[int]],
        submits: Sequence[pb.Submit],
        settings: GatewaySettings,
        memory: AnswerMemory,
        session: str = "",
        tenant: str = "",
        weight: float = 1.0,
        trace_id: str | None = None,
        order: int = 0,
    ) -> None:
        """prompts: the tokens of each of `submits`. session, order: as in Demand and AdmissionRequest.

        weight: the tenant's weight in the admission queue. trace_id: None when the request is not traced.
        """
        self.settings = settings
        self.session = session
        self.trace_id = trace_id
        self._n = submits[0].sampling.n
        self._admission = fleet.admission
        self._memory = memory
        self.unread = Unread(memory, self._n * len(submits))
        self._write: asyncio.Timeout | None = None  # the limit of what the reader is writing to its client
        self.failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._up_to_date = 0.0  # when the reader last had all tokens, on the event loop's clock
        self._reading_since = 0.0  # when the reader last began to wait, on the event loop's clock
        self._read_timer: asyncio.TimerHandle | None = None
        self._prompts = [
            Prompt(self, fleet, token_ids, submit, index * self._n)
            for index, (token_ids, submit) in enumerate(zip(prompts, submits, strict=True))
        ]
        self._admission_request = AdmissionRequest(
            [prompt.demand(prompt.submit) for prompt in self._prompts],
            self._admitted,
            self.fail,
            tenant,
            weight,
            submits[0].priority,
            order,
        )
        self._queue_timer: asyncio.TimerHandle | None = None
        self._to_start: deque[Prompt] = deque()
        # Monotonic times: when the request entered the admission queue, was admitted, and was sent to pods.
        self.queued_at = self.admitted_at = 0.0
        self.sent_at: float | None = None
        self.retries = 0  # prompts that were sent again before their first token
        self.resumes = 0  # choices that continued on another pod after their first token

    def start(self) -> None:
        """Queue for admission, then send every prompt to a decode pod. `read` raises the error if this fails."""
        self.queued_at = time.monotonic()
        self._queue_timer = asyncio.get_running_loop().call_later(self.settings.queue_timeout_s, self._queue_timed_out)
        self._admission.submit(self._admission_request)

    def _admitted(self) -> None:
        self._leave_queue()
        self.admitted_at = time.monotonic()
        self._to_start.extend(self._prompts)
        self._start_some()

    def _start_some(self) -> None:
        """Start prompts for one time slice. Later slices start the rest, since a request may have hundreds."""
        until = time.monotonic() + SLICE_S
        try:
            while self._to_start:
                self._to_start.popleft().start()
                self.sent_at = time.monotonic()
                if self._to_start and self.sent_at > until:
                    asyncio.get_running_loop().call_soon(self._start_some)
                    return
        except ApiError as error:
            self.fail(error)

    def _queue_timed_out(self) -> None:
        self.fail(overloaded("The server is busy: the request has waited for too long. Try again later."))

    def _leave_queue(self) -> None:
        if self._queue_timer is not None:
            self._queue_timer.cancel()
            self._queue_timer = None

    async def read(self, timeout_s: float) -> list[tuple[int, pb.Delta]]:
        """Wait up to `timeout_s` for tokens. Return deltas that have arrived, if any, as Unread.take does.

        Raises ApiError when a prompt failed, ClientGoneError when the client disconnected.
        """
        self.unread.note_written()
        if not self.unread and self.failure is None:
            loop = asyncio.get_running_loop()
            self._reader = loop.create_future()
            self._reading_since = loop.time()
            if self._read_timer is None:
                self._read_timer = loop.call_later(timeout_s, self._check_read_timeout, timeout_s)
            try:
                await self._reader
            finally:
                self._reader = None
                self._up_to_date = loop.time()
        if self.unread:
            taken = self.unread.take()
            if self.unread:
                await asyncio.sleep(0)  # there may be so much more that other tasks would have to wait
            return taken
        if self.failure is not None:
            raise self.failure
        return []

    @contextlib.contextmanager
    def writing(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Write to the client within. If the client is too slow, the limit ends the write, and `failure` says why."""
        self._write = limit
        try:
            yield
        finally:
            self._write = None

    def stop(self, choice: int) -> None:
        """End a choice early; its pod generates no more tokens for it."""
        self._prompts[choice // self._n].stop(choice % self._n)

    def fail(self, failure: Exception) -> None:
        """Cancel all prompts. The reader gets the tokens that have arrived, then `failure`."""
        if self.failure is None:
            self.failure = failure
        self.close()
        self._wake()

    def close(self) -> None:
        """Leave the admission queue and cancel all prompts that still run."""
        if self._queue_timer is not None:
            self._leave_queue()
            self._admission.withdraw(self._admission_request)
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        self._to_start.clear()
        for prompt in self._prompts:
            prompt.cancel()

    def put(self, choice: int, delta: pb.Delta) -> None:
        at_once = self._reader is not None
        if at_once and not (self._memory.keeps and delta.logprobs):
            self.unread.put(choice, delta)
        else:
            self.unread.hold(choice, delta)
        if not at_once or self._memory.keeps:
            try:
                self._count(delta)
            except ApiError as error:
                # Nobody will read these tokens: free their memory along with the blocks on the pods.
                self.unread.drop()
                self.fail(error)
        self._wake()

    def _count(self, delta: pb.Delta) -> None:
        """Count a delta in the answer's memory. Raises ApiError when this is beyond a limit."""
        if self._memory.keeps:
            self._memory.keep(len(delta.token_ids), delta.logprobs)
            return
        too_many = self.unread.tokens > self.settings.max_unread_tokens
        full = self._memory.hold(size_of(delta))
        too_slow = full and asyncio.get_running_loop().time() - self._up_to_date > _SLOW_S
        if (too_many or too_slow) and self._write is not None:
            if not self._write.expired():
                self._write.reschedule(0)  # at once
            raise ApiError(408, "The stream was read too slowly.", code="slow_reader")
        if too_many:
            raise overloaded("The server is busy: the stream could not be written fast enough. Try again later.")

    def _check_read_timeout(self, timeout_s: float) -> None:
        """Wake a reader that has waited for `timeout_s`. One timer serves many reads, since setting it costs time."""
        loop = asyncio.get_running_loop()
        now, deadline = loop.time(), self._reading_since + timeout_s
        if self._reader is None or deadline <= now:
            self._wake()
            deadline = now + timeout_s
        self._read_timer = loop.call_at(deadline, self._check_read_timeout, timeout_s)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
