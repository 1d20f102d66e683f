"""What runs on the pods for one HTTP request."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from baton_proto import serving_pb2 as pb

from ..concurrency.pace import SLICE_S
from ..errors import ApiError, overloaded
from ..fleet.fleet import Fleet
from ..routing.admission import Ask
from .prompt import Prompt
from .stream_limits import StreamLimits


class ClientGoneError(Exception):
    """The client closed its connection."""


class Generation:
    """One or more prompts on the pods, their tokens gathered in one place.

    Choices are numbered through: prompt by prompt, n for each. When a decode pod is lost, they go on on another.
    """

    def __init__(
        self,
        fleet: Fleet,
        submits: Sequence[pb.Submit],
        limits: StreamLimits,
        session: str = "",
        tenant: str = "",
        weight: float = 1.0,
        trace_id: str | None = None,
        order: int = 0,
    ) -> None:
        """session: as Demand has it. weight: of the tenant, when it takes turns with others. order: as Ask has it.

        trace_id: None when it is not traced.
        """
        self.limits = limits
        self.session = session
        self.trace_id = trace_id
        self._n = submits[0].sampling.n
        self._admission = fleet.admission
        self._unread = 0
        self._arrived: list[tuple[int, pb.Delta]] = []
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._silent_from = 0.0  # since when the reader waits, or last waited; of the event loop's clock
        self._alarm: asyncio.TimerHandle | None = None
        self._prompts = [Prompt(self, fleet, submit, i * self._n) for i, submit in enumerate(submits)]
        self._ask = Ask(
            [prompt.demand(prompt.submit) for prompt in self._prompts],
            self._come_in,
            self.fail,
            tenant,
            weight,
            submits[0].priority,
            order,
        )
        self._waiting: asyncio.TimerHandle | None = None
        self._to_start: deque[Prompt] = deque()
        # When it wanted to be sent to pods, when its turn had come and when it was; of the monotonic clock.
        self.asked_at = self.let_in_at = 0.0
        self.sent_at: float | None = None
        self.retries = 0  # prompts sent once more before anything of them came
        self.resumes = 0  # choices that went on on another pod

    def start(self) -> None:
        """Send every prompt to a decode pod as soon as its turn has come; `read` raises what prevents that."""
        self.asked_at = time.monotonic()
        self._waiting = asyncio.get_running_loop().call_later(self.limits.queue_timeout_s, self._wait_no_more)
        self._admission.ask(self._ask)

    def _come_in(self) -> None:
        self._leave_queue()
        self.let_in_at = time.monotonic()
        self._to_start.extend(self._prompts)
        self._start_some()

    def _start_some(self) -> None:
        """Start prompts for a slice of time, and the others later: they may be hundreds."""
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

    def _wait_no_more(self) -> None:
        self.fail(overloaded("The server is busy: the request has waited for too long. Try again later."))

    def _leave_queue(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    async def read(self, timeout_s: float) -> list[tuple[int, pb.Delta]]:
        """Wait for tokens, and return all that came, each with the number of its choice; none after `timeout_s`.

        Raises ApiError when a prompt failed, ClientGoneError when the client left.
        """
        if not self._arrived and self._failure is None:
            loop = asyncio.get_running_loop()
            self._reader = loop.create_future()
            self._silent_from = loop.time()
            if self._alarm is None:
                self._alarm = loop.call_later(timeout_s, self._ring, timeout_s)
            try:
                await self._reader
            finally:
                self._reader = None
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._unread = 0
            return arrived
        if self._failure is not None:
            raise self._failure
        return []

    def stop(self, choice: int) -> None:
        """Ask for no more tokens of a choice."""
        self._prompts[choice // self._n].stop(choice % self._n)

    def fail(self, failure: Exception) -> None:
        """End everything; the reader gets `failure` after what came before it."""
        if self._failure is None:
            self._failure = failure
        self.close()
        self._wake()

    def close(self) -> None:
        """Cancel what still runs."""
        if self._waiting is not None:
            self._leave_queue()
            self._admission.withdraw(self._ask)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._to_start.clear()
        for prompt in self._prompts:
            prompt.cancel()

    def put(self, choice: int, delta: pb.Delta) -> None:
        self._arrived.append((choice, delta))
        self._unread += len(delta.token_ids)
        if self._unread > self.limits.max_unread_tokens:
            # What was not read is lost to the client anyway: give its memory back with the pod's blocks.
            self._arrived.clear()
            self.fail(ApiError(408, "The stream was read too slowly.", code="slow_reader"))
        else:
            self._wake()

    def _ring(self, timeout_s: float) -> None:
        """Wake a reader that has waited for long enough; one alarm serves many reads, as setting it costs time."""
        loop = asyncio.get_running_loop()
        now, due = loop.time(), self._silent_from + timeout_s
        if self._reader is None or due <= now:
            self._wake()
            due = now + timeout_s
        self._alarm = loop.call_at(due, self._ring, timeout_s)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
