"""Choices of a prompt on one decode pod."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from baton_gateway.decode_link import DecodeLink
from baton_gateway.errors import ApiError, bad_request, internal_error, overloaded
from baton_gateway.revision_metrics import Run
from baton_gateway.router import Route
from baton_proto import serving_pb2 as pb

log = logging.getLogger(__name__)

_RETRY_S = 0.05


class LegOwner(Protocol):
    """The prompt that a leg belongs to."""

    def dispatch(self, submit: pb.Submit, avoid: Sequence[str]) -> tuple[Route, DecodeLink, Run]: ...

    def prefilled(self, route: Route, prompt: pb.PromptInfo) -> None: ...

    def put(self, delta: pb.Delta) -> bool: ...

    def fail(self, error: ApiError) -> None: ...

    def go_on(self, leg: "Leg", otherwise: ApiError) -> None: ...


class Leg:
    """Choices of a prompt on one decode pod, until they end or it is lost."""

    def __init__(self, prompt: LegOwner, submit: pb.Submit, choices: Iterable[int], patience_s: float) -> None:
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

    def successor(self, submit: pb.Submit, choices: Iterable[int]) -> "Leg":
        """Return the leg on which choices of this one go on."""
        leg = Leg(self._prompt, submit, choices, self._patience_s)
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
