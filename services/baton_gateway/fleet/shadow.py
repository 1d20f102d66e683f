"""A copy of a request that a canary in shadow mode computes, and whose answer is dropped."""

import time
from collections.abc import Callable

from baton_proto import serving_pb2 as pb

from ..routing.router import Route
from ..routing.stalls import StallTimeouts
from ..telemetry.revision_metrics import Run
from .decode_link import DecodeLink


class Shadow:
    """Follows a copy until the pod has ended it.

    Stop strings do not end it, as nobody reads its text. It costs its pods as much as the request itself would.
    """

    def __init__(self, route: Route, run: Run, stalls: StallTimeouts, over: Callable[["Shadow"], None]) -> None:
        """over: called when the copy has ended."""
        self._route = route
        self._stalls = stalls
        self._link: DecodeLink | None = None
        self._handle = 0
        self._known_tokens = 0
        self._run = run
        self._over = over
        self._choices: dict[int, float] = {}  # the choices that still run, with the time of their last tokens

    def start(self, submit: pb.Submit, link: DecodeLink) -> None:
        copy = pb.Submit()
        copy.CopyFrom(submit)
        copy.prefill_addresses[:] = [pod.address for pod in self._route.prefills]
        self._choices = dict.fromkeys(range(submit.sampling.n), time.monotonic())
        self._known_tokens = len(submit.prompt_token_ids)
        self._link, self._handle = link, link.submit(copy, self)

    def deliver(self, delta: pb.Delta) -> bool:
        if delta.finish_reason == pb.FINISH_REASON_ERROR:
            # An invalid request is not the fault of the revision.
            self._end(ok=delta.failure.code == pb.Failure.CODE_INVALID)
            return True
        if self._run.first_token is None:
            self._route.prefilled(delta.prompt.disaggregated)
            self._choices = dict.fromkeys(self._choices, time.monotonic())
        self._run.tokens(len(delta.token_ids))
        self._known_tokens += len(delta.token_ids)
        if delta.finish_reason != pb.FINISH_REASON_NONE:
            self._choices.pop(delta.choice, None)
        elif delta.choice in self._choices:
            self._choices[delta.choice] = self._run.last_token
        if not self._choices:
            self._end(ok=True)
        return not self._choices

    def handover_failed(self, prefill_address: str) -> None:
        self._route.handover_failed(prefill_address)

    def lost(self) -> None:
        self._end(ok=False)

    def check(self, now: float) -> None:
        """Cancel a stalled copy. It is not sent to another pod, because it has shown that the revision stalls."""
        silent_s = now - min(self._choices.values(), default=now)
        begun = self._run.first_token is not None
        if self._link is not None and self._stalls.stalled(self._route, begun, silent_s, self._known_tokens):
            self._link.cancel(self._handle)
            self._end(ok=False)

    def _end(self, ok: bool) -> None:
        if not ok:
            self._route.decode_failed()
        self._route.done()
        self._run.ended(ok)
        self._over(self)
