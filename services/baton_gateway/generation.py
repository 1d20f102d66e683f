"""What runs on the pods for one HTTP request."""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton_gateway.admission import Ask
from baton_gateway.decode_link import DecodeLink
from baton_gateway.demand import Demand
from baton_gateway.errors import ApiError, bad_request, internal_error, overloaded
from baton_gateway.fleet import Fleet
from baton_gateway.revision_metrics import Run
from baton_gateway.router import Route
from baton_proto import serving_pb2 as pb

log = logging.getLogger(__name__)

_RETRY_S = 0.05


class ClientGoneError(Exception):
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class Patience:
    """What a generation puts up with.

    unread_tokens: more of them waiting to be read end it. losses: after more pods lost with a choice it fails, as it
    may be what kills them. queue_s: how long it waits for its turn. resume_s: how long a choice waits when no pod is
    left to go on.
    """

    unread_tokens: int
    losses: int
    queue_s: float
    resume_s: float


class Generation:
    """One or more prompts on the pods, their tokens gathered in one place.

    Choices are numbered through: prompt by prompt, n for each. When a decode pod is lost, they go on on another.
    """

    def __init__(
        self,
        fleet: Fleet,
        submits: Sequence[pb.Submit],
        patience: Patience,
        session: str = "",
        tenant: str = "",
        weight: float = 1.0,
        trace_id: str | None = None,
        order: int = 0,
    ) -> None:
        """session: as Demand has it. weight: of the tenant, when it takes turns with others. order: as Ask has it.

        trace_id: None when it is not traced.
        """
        self.patience = patience
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
        self._prompts = [_Prompt(self, fleet, submit, i * self._n) for i, submit in enumerate(submits)]
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
        # When it wanted to be sent to pods, when its turn had come and when it was; of the monotonic clock.
        self.asked_at = self.let_in_at = 0.0
        self.sent_at: float | None = None
        self.retries = 0  # prompts sent once more before anything of them came
        self.resumes = 0  # choices that went on on another pod

    def start(self) -> None:
        """Send every prompt to a decode pod as soon as its turn has come; `read` raises what prevents that."""
        self.asked_at = time.monotonic()
        self._waiting = asyncio.get_running_loop().call_later(self.patience.queue_s, self._wait_no_more)
        self._admission.ask(self._ask)

    def _come_in(self) -> None:
        self._leave_queue()
        self.let_in_at = time.monotonic()
        try:
            for prompt in self._prompts:
                prompt.start()
            self.sent_at = time.monotonic()
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
        for prompt in self._prompts:
            prompt.cancel()

    def put(self, choice: int, delta: pb.Delta) -> None:
        self._arrived.append((choice, delta))
        self._unread += len(delta.token_ids)
        if self._unread > self.patience.unread_tokens:
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


class _Prompt:
    """One prompt, the journal of what the client has of its choices, and the pods that work on them."""

    def __init__(self, generation: Generation, fleet: Fleet, submit: pb.Submit, first_choice: int) -> None:
        self._generation = generation
        self._first_choice = first_choice
        self._legs: dict[int, _Leg] = {}  # by choice, those that still run
        self._journal: list[list[int]] = [[] for _ in range(submit.sampling.n)]
        self._fingerprint: str | None = None  # of the pods that began
        self._fleet = fleet
        self.submit = submit

    def demand(self, submit: pb.Submit) -> Demand:
        known = [*submit.prompt_token_ids, *submit.continuation.token_ids]
        return Demand.of(known, len(submit.prompt_token_ids) + submit.sampling.max_tokens, self._generation.session)

    def start(self) -> None:
        """Send the prompt to a decode pod. Raises ApiError when there is none."""
        leg = _Leg(self, self.submit, range(self.submit.sampling.n), self._generation.patience.resume_s)
        self._legs.update(dict.fromkeys(leg.choices, leg))
        leg.start()
        if self._fleet.shadowed:
            self._fleet.shadow(self.submit, self.demand(self.submit))

    def dispatch(self, submit: pb.Submit, avoid: Sequence[str]) -> tuple[Route, DecodeLink, Run]:
        """Choose pods; once there are tokens, only such as would have generated the same. Raises ApiError."""
        same = self._fingerprint if any(self._journal) else None
        chosen = self._fleet.dispatch(self.demand(submit), avoid, same)
        route, _, run = chosen
        self._fingerprint = route.decode.fingerprint
        run.trace_id = self._generation.trace_id
        return chosen

    def prefilled(self, route: Route, prompt: pb.PromptInfo) -> None:
        self._fleet.prefilled(route, prompt)

    def put(self, delta: pb.Delta) -> bool:
        """Take new tokens; return False, with nothing taken, when some before them are missing."""
        journal = self._journal[delta.choice]
        if delta.offset != len(journal):
            return False
        journal += delta.token_ids
        if delta.finish_reason != pb.FINISH_REASON_NONE:
            del self._legs[delta.choice]
        self._generation.put(self._first_choice + delta.choice, delta)
        return True

    def stop(self, choice: int) -> None:
        leg = self._legs.pop(choice, None)
        if leg is not None:
            leg.stop(choice)

    def cancel(self) -> None:
        legs, self._legs = self._legs, {}
        for leg in set(legs.values()):
            leg.cancel()

    def fail(self, error: ApiError) -> None:
        self._generation.fail(error)

    def go_on(self, leg: "_Leg", otherwise: ApiError) -> None:
        """Let the choices of a leg that has ended early go on elsewhere, each from its last token."""
        if leg.losses > self._generation.patience.losses:
            self.fail(otherwise)
            return
        if any(self._journal):
            self._generation.resumes += len(leg.choices)
            successors = [leg.successor(self._continuation(choice), [choice]) for choice in sorted(leg.choices)]
        else:
            self._generation.retries += 1
            successors = [leg.successor(self.submit, leg.choices)]
        for successor in successors:
            self._legs.update(dict.fromkeys(successor.choices, successor))
        for successor in successors:
            successor.start_when_possible(otherwise)

    def _continuation(self, choice: int) -> pb.Submit:
        submit = pb.Submit()
        submit.CopyFrom(self.submit)
        submit.continuation.choice = choice
        submit.continuation.token_ids[:] = self._journal[choice]
        submit.sampling.n = 1
        submit.sampling.ClearField("prompt_logprobs")
        return submit


class _Leg:
    """Choices of a prompt on one decode pod, until they end or it is lost."""

    def __init__(self, prompt: _Prompt, submit: pb.Submit, choices: Iterable[int], patience_s: float) -> None:
        """patience_s: how long it may wait for a decode pod, if there is none."""
        self.choices = set(choices)
        self.losses = 0  # pods lost with these choices, by this leg and those before
        self._refusals = 0  # likewise, pods that did not take them or gave them back
        self._avoid: tuple[str, ...] = ()  # pods to be chosen only if there is no other
        self._patience_s = patience_s
        self._prompt = prompt
        self._submit = submit
        self._begun = False
        self._route: Route | None = None
        self._link: DecodeLink | None = None
        self._run: Run | None = None
        self._waiting: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Send the request to a decode pod. Raises ApiError when there is none."""
        self._route, self._link, self._run = self._prompt.dispatch(self._submit, self._avoid)
        self._submit.prefill_addresses[:] = [pod.address for pod in self._route.prefills]
        self._link.submit(self._submit, self)

    def start_when_possible(self, otherwise: ApiError) -> None:
        """As `start`, as soon as there is a decode pod; fail with `otherwise` when patience ends before."""
        # Whoever refuses will do so again if asked at once.
        if self._refusals > 1:
            self._wait(otherwise)
        else:
            self._try(otherwise)

    def _try(self, otherwise: ApiError) -> None:
        try:
            self.start()
        except ApiError:
            self._wait(otherwise)

    def _wait(self, otherwise: ApiError) -> None:
        self._patience_s -= _RETRY_S
        if self._patience_s < 0:
            self._prompt.fail(otherwise)
        else:
            self._waiting = asyncio.get_running_loop().call_later(_RETRY_S, self._try, otherwise)

    def successor(self, submit: pb.Submit, choices: Iterable[int]) -> "_Leg":
        """Return the leg on which choices of this one go on."""
        leg = _Leg(self._prompt, submit, choices, self._patience_s)
        leg.losses, leg._refusals, leg._avoid = self.losses, self._refusals, self._avoid
        return leg

    def deliver(self, delta: pb.Delta) -> bool:
        if delta.finish_reason == pb.FINISH_REASON_ERROR:
            if delta.failure.code != pb.Failure.CODE_INVALID:
                self._blame_decode()
            self._release()
            self._failed(delta.failure)
            return True
        if not self._begun:
            self._begun = True
            if self._route is not None:
                self._prompt.prefilled(self._route, delta.prompt)
        if delta.choice not in self.choices:
            return False
        if not self._prompt.put(delta):
            log.error("tokens are missing", extra={"request_id": self._submit.request_id, "choice": delta.choice})
            self._blame_decode()
            self._leave()
            self._lost()
            return True
        if self._run is not None:
            self._run.tokens(len(delta.token_ids))
        if delta.finish_reason != pb.FINISH_REASON_NONE:
            self.choices.discard(delta.choice)
            if not self.choices:
                self._end_run(ok=True)
                self._release()
        return not self.choices

    def handover_failed(self, prefill_address: str) -> None:
        if self._route is not None:
            self._route.handover_failed(prefill_address)

    def lost(self) -> None:
        self._blame_decode()
        self._release()
        if self.choices:
            self._lost()

    def stop(self, choice: int) -> None:
        self.choices.discard(choice)
        if not self.choices:
            self.cancel()
        elif self._link is not None:
            self._link.cancel_choice(self._submit.handle, choice)

    def cancel(self) -> None:
        # Whoever has read enough, or has left, had what there was so far.
        if self._begun:
            self._end_run(ok=True)
        self.choices.clear()
        if self._waiting is not None:
            self._waiting.cancel()
        self._leave()

    def _leave(self) -> None:
        if self._route is not None and self._link is not None:
            self._link.cancel(self._submit.handle)
        self._release()

    def _lost(self) -> None:
        self.losses += 1
        self._prompt.go_on(self, overloaded("The decode pod was lost."))

    def _failed(self, failure: pb.Failure) -> None:
        if failure.code == pb.Failure.CODE_INVALID:
            self._prompt.fail(bad_request(failure.message, failure.param or None))
        elif failure.code == pb.Failure.CODE_UNAVAILABLE:
            self._refusals += 1
            self._prompt.go_on(self, overloaded(failure.message or "The decode pod cannot take the request now."))
        else:
            log.error(
                "pod failed on a request", extra={"request_id": self._submit.request_id, "reason": failure.message}
            )
            self._prompt.fail(internal_error())

    def _blame_decode(self) -> None:
        self._end_run(ok=False)
        if self._route is not None:
            self._route.decode_failed()

    def _end_run(self, ok: bool) -> None:
        if self._run is not None:
            self._run.ended(ok)
            self._run = None

    def _release(self) -> None:
        if self._route is not None:
            self._avoid = (*self._avoid, self._route.decode.address)
            self._route.done()
            self._route = None
