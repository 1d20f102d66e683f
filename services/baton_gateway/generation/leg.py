"""Runs choices of a prompt on one decode pod, and moves them to another pod when that one fails."""

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from baton_proto import serving_pb2 as pb

from ..errors import ApiError, bad_request, internal_error, no_decode_pod, overloaded
from ..fleet.decode_link import DecodeLink
from ..fleet.fleet import Fleet
from ..routing.pods import Pod
from ..routing.router import Route
from ..telemetry.retry_metrics import Reason
from ..telemetry.revision_metrics import Run

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05  # the first backoff of a request that pods have refused twice
_LAST_PAUSE_S = 2.0
_REFUSAL_RECHECK_S = 1.0  # by then, a pod that refused because it is shutting down has reported that


class LegOwner(Protocol):
    """The prompt that a leg belongs to."""

    fleet: Fleet

    @property
    def begun(self) -> bool: ...

    def has_other(self, avoid: Sequence[str]) -> bool: ...

    def known_tokens(self, choice: int) -> int: ...

    def dispatch(self, submit: pb.Submit, avoid: Sequence[str]) -> tuple[Route, DecodeLink, Run]: ...

    def put(self, delta: pb.Delta) -> bool: ...

    def fail(self, error: ApiError) -> None: ...

    def resume(self, leg: "Leg", error: ApiError) -> None: ...


class Leg:
    """Runs choices of a prompt on one decode pod, until they end or the pod is lost."""

    def __init__(self, prompt: LegOwner, submit: pb.Submit, choices: Iterable[int], resume_s: float) -> None:
        """resume_s: seconds that this leg and its successors may wait for a decode pod, all waits together."""
        self.choices = dict.fromkeys(choices, 0.0)  # monotonic time of the last token, or of sending
        self.losses = 0  # pods lost with these choices, including those of earlier legs
        self._refusals = 0  # times that a pod refused these choices or handed them back, including earlier legs
        self._avoid: tuple[str, ...] = ()  # addresses of pods that are chosen only if no other can take the request
        self._resume_s = resume_s
        self._prompt = prompt
        self._submit = submit
        self._begun = False
        self._route: Route | None = None
        self._link: DecodeLink | None = None
        self._run: Run | None = None
        self._resume_error = no_decode_pod()
        self._resume_deadline = 0.0  # of the event loop's clock
        self._timers: list[asyncio.TimerHandle] = []

    def start(self) -> None:
        """Send the request to a decode pod. Raises ApiError when there is none."""
        self._route, self._link, self._run = self._prompt.dispatch(self._submit, self._avoid)
        self._submit.prefill_addresses[:] = [pod.address for pod in self._route.prefills]
        self._link.submit(self._submit, self)
        self._restart_stall_clock(self._run.sent)

    def start_when_possible(self, error: ApiError) -> None:
        """Start as soon as a decode pod can take the request. Fail with `error` if none can within `resume_s`."""
        self._resume_error = error
        loop = asyncio.get_running_loop()
        self._resume_deadline = loop.time() + self._resume_s
        self._timers = [loop.call_at(self._resume_deadline, self._resume_timed_out)]
        # A pod that has just refused would refuse an immediate retry, too.
        if self._refusals > 1:
            pause_s = min(_FIRST_PAUSE_S * 2 ** min(self._refusals - 2, 16), _LAST_PAUSE_S)
            self._timers.append(loop.call_later(pause_s * random.uniform(0.5, 1), self._prompt.fleet.resumes.add, self))
        else:
            self._prompt.fleet.resumes.add(self)

    def try_start(self) -> bool:
        try:
            self.start()
        except ApiError:
            return False
        self._resume_s = max(self._resume_deadline - asyncio.get_running_loop().time(), 0.0)
        self._stop_waiting()
        return True

    def _resume_timed_out(self) -> None:
        self._stop_waiting()
        # The queue may not have reached this leg yet, so it tries once itself. After repeated refusals it gives up.
        if self._refusals > 1 or not self.try_start():
            self._prompt.fail(self._resume_error)

    def _stop_waiting(self) -> None:
        timers, self._timers = self._timers, []
        for timer in timers:
            timer.cancel()
        self._prompt.fleet.resumes.remove(self)

    def successor(self, submit: pb.Submit, choices: Iterable[int]) -> "Leg":
        """Return a leg that continues choices of this one. It inherits losses, refusals and the time left to wait."""
        leg = Leg(self._prompt, submit, choices, self._resume_s)
        leg.losses, leg._refusals, leg._avoid = self.losses, self._refusals, self._avoid
        return leg

    def deliver(self, delta: pb.Delta) -> bool:
        if delta.finish_reason == pb.FINISH_REASON_ERROR:
            if delta.failure.code == pb.Failure.CODE_NOT_FINITE:
                # The model is at fault, not the pod. A client that provokes this must not open the breakers of pods.
                self._end_run(ok=False)
            elif delta.failure.code != pb.Failure.CODE_INVALID:
                self._blame_decode()
            pod = self._route.decode if self._route is not None else None
            self._release()
            self._failed(delta.failure, pod)
            return True
        if not self._begun:
            self._begun = True
            if self._route is not None:
                self._prompt.fleet.prefilled(self._route, delta.prompt)
            self._restart_stall_clock(time.monotonic())
        if delta.choice not in self.choices:
            return False
        if not self._prompt.put(delta):
            log.error("tokens are missing", extra={"request_id": self._submit.request_id, "choice": delta.choice})
            self._give_up("missing_tokens")
            return True
        if self._run is not None:
            self._run.tokens(len(delta.token_ids))
            self.choices[delta.choice] = self._run.last_token
        if delta.finish_reason != pb.FINISH_REASON_NONE:
            del self.choices[delta.choice]
            if not self.choices:
                self._end_run(ok=True)
                self._release()
        return not self.choices

    def handover_failed(self, prefill_address: str) -> None:
        if self._route is not None:
            self._route.handover_failed(prefill_address)
            if not self._begun:
                self._restart_stall_clock(time.monotonic())  # only now does another pod start the prefill

    def lost(self) -> None:
        self._blame_decode()
        self._release()
        if self.choices:
            self._prompt.fleet.retries.left("pod_lost")
            self._lost()

    def check(self, now: float) -> None:
        """Leave a stalled pod if another pod could take over and the retry budget allows it."""
        route, fleet = self._route, self._prompt.fleet
        if route is None or not self.choices:
            return
        choice, last = min(self.choices.items(), key=lambda item: item[1])
        stall = fleet.stalls.stalled(route, self._begun, now - last, self._prompt.known_tokens(choice))
        # Without another healthy pod the request stays: all pods may be slow, and this one has a part of the answer.
        if stall is None or not self._prompt.has_other((*self._avoid, route.decode.address)):
            return
        if not fleet.budget.take():
            fleet.retries.exhausted()
            return
        extra = {"request_id": self._submit.request_id, "pod": route.decode.address, "reason": stall}
        log.warning("no token came in time", extra=extra)
        self._give_up(stall)

    def stop(self, choice: int) -> None:
        self.choices.pop(choice, None)
        if not self.choices:
            self.cancel()
        elif self._link is not None:
            self._link.cancel_choice(self._submit.handle, choice)

    def cancel(self) -> None:
        # The client stopped reading or disconnected, so the pod is not at fault: the run counts as a success.
        if self._begun:
            self._end_run(ok=True)
        self.choices.clear()
        self._stop_waiting()
        self._leave()

    def _leave(self) -> None:
        if self._route is not None and self._link is not None:
            self._link.cancel(self._submit.handle)
        self._release()

    def _restart_stall_clock(self, now: float) -> None:
        for choice in self.choices:
            self.choices[choice] = now

    def _give_up(self, reason: Reason) -> None:
        """Leave a pod that stalled or lost tokens, and continue on another one."""
        self._prompt.fleet.retries.left(reason)
        self._blame_decode()
        self._leave()
        self._lost()

    def _lost(self) -> None:
        self.losses += 1
        self._prompt.resume(self, overloaded("The decode pod was lost."))

    def _failed(self, failure: pb.Failure, pod: Pod | None) -> None:
        if failure.code == pb.Failure.CODE_INVALID:
            self._prompt.fail(bad_request(failure.message, failure.param or None))
        elif failure.code == pb.Failure.CODE_UNAVAILABLE:
            self._refusals += 1
            refused = overloaded(failure.message or "The decode pod cannot take the request now.")
            if not self._may_retry(pod):
                delay_s = min(self._resume_s, _REFUSAL_RECHECK_S)
                self._resume_s -= delay_s
                self._timers = [asyncio.get_running_loop().call_later(delay_s, self._recheck_refusal, pod, refused)]
                return
            self._prompt.resume(self, refused)
        else:
            log.error(
                "pod failed on a request", extra={"request_id": self._submit.request_id, "reason": failure.message}
            )
            self._prompt.fail(internal_error())

    def _may_retry(self, pod: Pod | None) -> bool:
        """Whether the retry budget lets the choices go to another pod after `pod` has refused them.

        A request that a pod has accepted before, or whose pod is gone or shutting down, takes nothing from the budget.
        """
        fleet = self._prompt.fleet
        if self._prompt.begun or self.losses or pod is None or not pod.live:
            fleet.retries.left("handed_back")
            return True
        if fleet.budget.take():
            fleet.retries.left("refused")
            return True
        return False

    def _recheck_refusal(self, pod: Pod | None, refused: ApiError) -> None:
        self._timers = []
        if self._may_retry(pod):
            self._prompt.resume(self, refused)
        else:
            self._prompt.fleet.retries.exhausted()
            self._prompt.fail(refused)

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
