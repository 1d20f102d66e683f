"""Judges a canary by what gateways have counted, and says how much traffic it gets next. Knows no clock, no network."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from baton_controller.config_file import CanarySpec
from baton_controller.counters import Counters, Reading, Readings, extended, quantile, window

Reason = Literal["CanaryAdvanced", "CanaryPromoted", "CanaryRolledBack", "CanaryWaiting"]


class CanaryState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a canary stands. All there is to know: who loads it goes on where its writer stopped.

    weight: percent of the traffic. step: that weight's place among the steps, from 1; 0 when rolled back. since: when
    the interval began, in Unix time. start: what gateways had counted then. waiting: it was said that requests lack.
    """

    revision: str
    generation: str
    weight: int
    step: int
    since: float
    verdict: str
    rolled_back: bool = False
    waiting: bool = False
    start: dict[str, Reading] = {}


@dataclass(frozen=True)
class Decision:
    """The state from now on; reason and why when something was decided."""

    state: CanaryState
    reason: Reason | None = None
    why: str = ""


def look(state: CanaryState | None, spec: CanarySpec, now: float, readings: Readings) -> Decision:
    """Return what becomes of a canary. now: Unix time. readings: what gateways have counted until now."""
    if state is None or (state.revision, state.generation) != (spec.revision, str(spec.generation)):
        return _begin(spec, now, readings)
    if state.rolled_back:
        return Decision(state)
    start = extended(state.start, readings)
    state = msgspec.structs.replace(state, start=start)
    if now - state.since < spec.interval_seconds:
        return Decision(state)
    canary, stable = window(start, readings, spec.revision), window(start, readings, spec.stable)
    if min(canary.requests, stable.requests) < spec.min_requests:
        return _wait(state, spec, canary, stable)
    if faults := _faults(canary, stable, spec):
        return _roll_back(state, f"{spec.revision} is worse than {spec.stable}: {'; '.join(faults)}")
    return _advance(state, spec, now, readings, f"{_figures(canary)}; {spec.stable}: {_figures(stable)}")


def set_by_hand(state: CanaryState, spec: CanarySpec, weight: int, now: float, readings: Readings) -> CanaryState:
    """Return the state after somebody else has changed the weight: 0 stays, from another it goes on."""
    if weight == 0:
        return _roll_back(state, "the weight was set to 0 by hand").state
    step = sum(step <= weight for step in spec.steps)
    verdict = f"the weight was set to {weight} % by hand"
    return msgspec.structs.replace(
        state,
        weight=weight,
        step=step,
        since=now,
        verdict=verdict,
        start=dict(readings),
        rolled_back=False,
        waiting=False,
    )


def _begin(spec: CanarySpec, now: float, readings: Readings) -> Decision:
    weight = spec.steps[0]
    why = f"{spec.revision} begins with {weight} % of the requests"
    state = CanaryState(
        revision=spec.revision,
        generation=str(spec.generation),
        weight=weight,
        step=1,
        since=now,
        verdict=why,
        start=dict(readings),
    )
    return Decision(state, "CanaryAdvanced", why)


def _wait(state: CanaryState, spec: CanarySpec, canary: Counters, stable: Counters) -> Decision:
    # With all its traffic gone stable has nothing to compare with, and nothing is left to decide.
    if state.waiting or state.weight >= spec.steps[-1]:
        return Decision(state)
    why = (
        f"{spec.revision} stays at {state.weight} %: {canary.requests:.0f} requests, {spec.stable} "
        f"{stable.requests:.0f}, and each needs {spec.min_requests} to be compared"
    )
    return Decision(msgspec.structs.replace(state, waiting=True, verdict=why), "CanaryWaiting", why)


def _roll_back(state: CanaryState, why: str) -> Decision:
    state = msgspec.structs.replace(state, weight=0, step=0, rolled_back=True, waiting=False, verdict=why, start={})
    return Decision(state, "CanaryRolledBack", why)


def _advance(state: CanaryState, spec: CanarySpec, now: float, readings: Readings, figures: str) -> Decision:
    step, weight = next(
        ((number, step) for number, step in enumerate(spec.steps, 1) if step > state.weight),
        (len(spec.steps), state.weight),
    )
    rose = weight > state.weight
    why = f"{spec.revision} {'goes from' if rose else 'stays at'} {state.weight} %"
    why += f" to {weight} %: {figures}" if rose else f": {figures}"
    state = msgspec.structs.replace(
        state, weight=weight, step=step, since=now, waiting=False, verdict=why, start=dict(readings)
    )
    if not rose:
        return Decision(state)
    return Decision(state, "CanaryPromoted" if step == len(spec.steps) else "CanaryAdvanced", why)


def _faults(canary: Counters, stable: Counters, spec: CanarySpec) -> list[str]:
    faults = []
    if canary.error_rate - stable.error_rate > spec.max_error_rate_increase:
        faults.append(
            f"{canary.error_rate:.2%} of {canary.requests:.0f} requests failed, of {spec.stable} "
            f"{stable.error_rate:.2%} of {stable.requests:.0f} (limit: {spec.max_error_rate_increase:.2%} more)"
        )
    for name, mine, others, limit in (
        ("TTFT", canary.ttft, stable.ttft, spec.max_ttft_p95_ratio),
        ("TPOT", canary.tpot, stable.tpot, spec.max_tpot_p95_ratio),
    ):
        p95, stable_p95 = quantile(mine, 0.95), quantile(others, 0.95)
        # Without an observation on either side the requests have failed, or had one token: nothing to compare.
        if p95 is not None and stable_p95 is not None and p95 > limit * stable_p95:
            faults.append(
                f"{name} p95 {p95 * 1e3:.1f} ms, of {spec.stable} {stable_p95 * 1e3:.1f} ms (limit: {limit:g} times)"
            )
    return faults


def _figures(counters: Counters) -> str:
    parts = [f"{counters.requests:.0f} requests, {counters.error_rate:.2%} failed"]
    for name, buckets in (("TTFT", counters.ttft), ("TPOT", counters.tpot)):
        if (p95 := quantile(buckets, 0.95)) is not None:
            parts.append(f"{name} p95 {p95 * 1e3:.1f} ms")
    return ", ".join(parts)
