"""Keeps one prompt of a generation, and the journal of tokens from which its choices resume on another pod."""

from array import array
from collections.abc import Sequence
from typing import Protocol

from baton_common.cache_scope import CacheScope
from baton_proto import serving_pb2 as pb

from ..errors import ApiError
from ..fleet.decode_link import DecodeLink
from ..fleet.fleet import Fleet
from ..routing.demand import Demand
from ..routing.router import Route
from ..settings import GatewaySettings
from ..telemetry.revision_metrics import Run
from .leg import Leg


class PromptOwner(Protocol):
    """The generation that a prompt belongs to."""

    settings: GatewaySettings
    session: str
    trace_id: str | None
    retries: int
    resumes: int

    def put(self, choice: int, delta: pb.Delta) -> None: ...

    def fail(self, failure: Exception) -> None: ...


class Prompt:
    """Keeps the tokens that each choice has so far, and the legs that still run.

    A leg is the time that choices spend on one decode pod.
    """

    def __init__(
        self, generation: PromptOwner, fleet: Fleet, token_ids: Sequence[int], submit: pb.Submit, first_choice: int
    ) -> None:
        """token_ids: those of `submit`, from which they could be read only slowly."""
        self._generation = generation
        self._token_ids = array("I", token_ids)
        self._first_choice = first_choice
        self._legs: dict[int, Leg] = {}  # the running leg of each unfinished choice
        self._journal: list[list[int]] = [[] for _ in range(submit.sampling.n)]
        self._fingerprint: str | None = None  # of weights and KV layout of the pod that was chosen last
        self.fleet = fleet
        self._demand: Demand | None = None
        self.submit = submit

    def demand(self, submit: pb.Submit) -> Demand:
        if submit is not self.submit:
            return self._demand_of(submit)
        if self._demand is None:
            self._demand = self._demand_of(submit)
        return self._demand

    def _demand_of(self, submit: pb.Submit) -> Demand:
        known = self._token_ids + array("I", submit.continuation.token_ids[:])  # a slice is faster than an iterator
        max_total_tokens = len(submit.prompt_token_ids) + submit.sampling.max_tokens
        scope = CacheScope(submit.cache_scope.salt, submit.cache_scope.shared_tokens)
        return Demand.of(known, max_total_tokens, self._generation.session, scope)

    def start(self) -> None:
        """Send the prompt to a decode pod. Raises ApiError when there is none."""
        leg = Leg(self, self.submit, range(self.submit.sampling.n), self._generation.settings.resume_timeout_s)
        self._legs.update(dict.fromkeys(leg.choices, leg))
        leg.start()
        self.fleet.budget.note_request()
        if self.fleet.shadowed:
            self.fleet.shadow(self.submit, self.demand(self.submit))

    def dispatch(self, submit: pb.Submit, avoid: Sequence[str]) -> tuple[Route, DecodeLink, Run]:
        """Choose pods. Once there are tokens, only pods with the same fingerprint are chosen. Raises ApiError."""
        chosen = self.fleet.dispatch(self.demand(submit), avoid, self._required_fingerprint)
        route, _, run = chosen
        self._fingerprint = route.decode.fingerprint
        run.trace_id = self._generation.trace_id
        return chosen

    def has_other(self, avoid: Sequence[str]) -> bool:
        """Whether a decode pod outside `avoid` could start the prompt, or resume it."""
        max_total_tokens = len(self.submit.prompt_token_ids) + self.submit.sampling.max_tokens
        demand = Demand.of((), max_total_tokens, self._generation.session)
        return self.fleet.router.has_other(demand, avoid, self._required_fingerprint)

    def known_tokens(self, choice: int) -> int:
        return len(self.submit.prompt_token_ids) + len(self._journal[choice])

    @property
    def begun(self) -> bool:
        """Whether any choice has a token."""
        return any(self._journal)

    @property
    def _required_fingerprint(self) -> str | None:
        """The fingerprint that a pod must have to resume the prompt; None before the first token."""
        return self._fingerprint if self.begun else None

    def put(self, delta: pb.Delta) -> bool:
        """Append new tokens to the journal. Return False and append nothing if they do not continue it."""
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

    def resume(self, leg: Leg, error: ApiError) -> None:
        """Continue the choices of a leg that ended early. Each continues on another pod from its last token.

        The request fails with `error` if too many pods were lost, or no pod takes the choices in time.
        """
        if leg.losses > self._generation.settings.max_lost_pods:
            self.fail(error)
            return
        if self.begun:
            self._generation.resumes += len(leg.choices)
            successors = [leg.successor(self._continuation(choice), [choice]) for choice in sorted(leg.choices)]
        else:
            self._generation.retries += 1
            successors = [leg.successor(self.submit, leg.choices)]
        for successor in successors:
            self._legs.update(dict.fromkeys(successor.choices, successor))
        for successor in successors:
            successor.start_when_possible(error)

    def _continuation(self, choice: int) -> pb.Submit:
        submit = pb.Submit()
        submit.CopyFrom(self.submit)
        submit.continuation.choice = choice
        submit.continuation.token_ids[:] = self._journal[choice]
        submit.sampling.n = 1
        submit.sampling.ClearField("prompt_logprobs")
        return submit
