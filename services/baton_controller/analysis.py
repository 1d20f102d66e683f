"""Judges a canary by the counters of gateways and decides its next weight. Pure functions: no clock, no network."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from baton_controller import evidence
from baton_controller.comparison import Excess, excesses, fails_outright, figures
from baton_controller.config_file import CanarySpec
from baton_controller.counters import NOTHING, Counters, total

Reason = Literal["CanaryAdvanced", "CanaryPromoted", "CanaryRolledBack", "CanaryWaiting"]


class CanaryState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The progress of a canary. The size of this state does not depend on the number of gateways.

    weight: percent of the traffic. step: the number of the weight's step, from 1; 0 when rolled back. since: Unix time
    at which the interval began. canary, stable: the counts of both revisions since then, over all gateways.
    comparisons: how many were made at this step; undecided: how many of them since the interval began. waiting: true
    after CanaryWaiting was emitted because a revision had too few requests.
    """

    revision: str
    generation: str
    weight: int
    step: int
    since: float
    verdict: str
    rolled_back: bool = False
    waiting: bool = False
    comparisons: int = 0
    undecided: int = 0
    canary: Counters = NOTHING
    stable: Counters = NOTHING

    def judged_by(self, spec: CanarySpec) -> bool:
        """Whether this is the state of the canary in the configuration, with the same settings."""
        return (self.revision, self.generation) == (spec.revision, str(spec.generation))


@dataclass(frozen=True)
class Decision:
    """The new state. reason and why: of the change for Events and logs; None and empty without a change."""

    state: CanaryState
    reason: Reason | None = None
    why: str = ""


def decide(state: CanaryState | None, spec: CanarySpec, now: float, canary: Counters, stable: Counters) -> Decision:
    """Return the next state of a canary. now: Unix time. canary, stable: the counts since the last decision.

    The revisions are compared after `interval_seconds` and `min_requests` of each revision. The canary is rolled back
    when a measure is beyond its limit and chance is excluded as the reason (`evidence.level`). When a measure is beyond
    its limit and chance is not excluded, the canary keeps its weight, and the next comparison has more requests. The
    canary advances only when every measure is within its limit. A canary that fails outright is rolled back at once.
    """
    if state is None or not state.judged_by(spec):
        return _begin(spec, now)
    if state.rolled_back:
        return Decision(state)
    state = msgspec.structs.replace(state, canary=total([state.canary, canary]), stable=total([state.stable, stable]))
    level = evidence.level(len(spec.steps), state.comparisons + 1)
    if fails_outright(state.canary, state.stable, spec, level):
        why = f"{spec.revision} fails outright: {figures(state.canary)}; {spec.stable}: {figures(state.stable)}"
        return _roll_back(state, why)
    if now - state.since < spec.interval_seconds * (state.undecided + 1):
        return Decision(state)
    if min(state.canary.requests, state.stable.requests) < spec.min_requests * (state.undecided + 1):
        return _wait(state, spec, now)
    found = excesses(state.canary, state.stable, spec)
    if proven := [excess for excess in found if excess.chance < level]:
        return _roll_back(state, f"{spec.revision} is worse than {spec.stable}: {_text(proven)}")
    if found:
        return _stay(state, spec, found)
    return _advance(state, spec, now)


def set_by_hand(state: CanaryState, spec: CanarySpec, weight: int, now: float) -> CanaryState:
    """Return the state after an operator has set the weight. At 0 the canary counts as rolled back; else it goes on."""
    if weight == 0:
        return _roll_back(state, "the weight was set to 0 by hand").state
    step = sum(step <= weight for step in spec.steps)
    verdict = f"the weight was set to {weight} % by hand"
    state = msgspec.structs.replace(state, weight=weight, step=step, verdict=verdict, rolled_back=False)
    return _new_interval(state, now, comparisons=0)


def _begin(spec: CanarySpec, now: float) -> Decision:
    weight = spec.steps[0]
    why = f"{spec.revision} begins with {weight} % of the requests"
    state = CanaryState(
        revision=spec.revision,
        generation=str(spec.generation),
        weight=weight,
        step=1,
        since=now,
        verdict=why,
    )
    return Decision(state, "CanaryAdvanced", why)


def _new_interval(state: CanaryState, now: float, comparisons: int) -> CanaryState:
    return msgspec.structs.replace(
        state, since=now, waiting=False, comparisons=comparisons, undecided=0, canary=NOTHING, stable=NOTHING
    )


def _wait(state: CanaryState, spec: CanarySpec, now: float) -> Decision:
    if state.weight == 100:
        # Stable gets no requests, so only an outright failure can be seen. Earlier successes must not hide a later one.
        return Decision(_new_interval(state, now, state.comparisons + 1))
    if state.waiting or state.weight >= spec.steps[-1]:
        return Decision(state)
    why = (
        f"{spec.revision} stays at {state.weight} %: {state.canary.requests:.0f} requests, {spec.stable} "
        f"{state.stable.requests:.0f}, and each needs {spec.min_requests * (state.undecided + 1)} to be compared"
    )
    return Decision(msgspec.structs.replace(state, waiting=True, verdict=why), "CanaryWaiting", why)


def _stay(state: CanaryState, spec: CanarySpec, found: list[Excess]) -> Decision:
    why = (
        f"{spec.revision} stays at {state.weight} % until it is compared again after {spec.min_requests} more "
        f"requests, as this may be chance: {_text(found)}"
    )
    state = msgspec.structs.replace(
        state, comparisons=state.comparisons + 1, undecided=state.undecided + 1, waiting=False, verdict=why
    )
    return Decision(state, "CanaryWaiting", why)


def _roll_back(state: CanaryState, why: str) -> Decision:
    state = _new_interval(state, state.since, comparisons=0)
    state = msgspec.structs.replace(state, weight=0, step=0, rolled_back=True, verdict=why)
    return Decision(state, "CanaryRolledBack", why)


def _advance(state: CanaryState, spec: CanarySpec, now: float) -> Decision:
    step, weight = next(
        ((number, step) for number, step in enumerate(spec.steps, 1) if step > state.weight),
        (len(spec.steps), state.weight),
    )
    rose = weight > state.weight
    why = f"{spec.revision} {'goes from' if rose else 'stays at'} {state.weight} %"
    why += f" to {weight} %" if rose else ""
    why += f": {figures(state.canary)}; {spec.stable}: {figures(state.stable)}"
    # The last step is compared again after each interval, and its comparisons share the step's false-alarm rate.
    state = _new_interval(state, now, comparisons=0 if rose else state.comparisons + 1)
    state = msgspec.structs.replace(state, weight=weight, step=step, verdict=why)
    if not rose:
        return Decision(state)
    return Decision(state, "CanaryPromoted" if step == len(spec.steps) else "CanaryAdvanced", why)


def _text(found: list[Excess]) -> str:
    return "; ".join(excess.text for excess in found)
