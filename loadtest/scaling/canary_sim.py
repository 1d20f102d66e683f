"""Simulates whole rollouts with the controller's own analysis and the gateways' buckets.

`python loadtest/scaling/canary_sim.py` prints how often identical canaries are rolled back, and how often and when
worse ones are. Each step brings the requests that its weight implies: at 5 %, 19 of stable's for each of the
canary's. Seeded.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton_common.buckets import ITL_BUCKETS, TTFT_BUCKETS
from baton_controller.analysis import CanaryState, decide
from baton_controller.config_file import CanarySpec
from baton_controller.counters import NOTHING, Buckets, Counters

STEPS = CanarySpec(revision="canary").steps
CHART_STEPS = (5, 10, 25, 50, 100)
_INTERVAL_S = 60.0
_MOST_COMPARISONS = 60


@dataclass(frozen=True)
class Scenario:
    """A rollout. slowdown: the factor on the canary's times; tail_only: on the slowest tenth of requests only.

    measure: `ttft` or `tpot`, to which the slowdown applies. errors, stable_errors: shares of failing requests.
    first_bad_weight: the regression is there from this weight on.
    """

    sigma: float = 0.8
    requests: int = 300
    steps: tuple[int, ...] = STEPS
    measure: str = "ttft"
    slowdown: float = 1.0
    tail_only: bool = False
    errors: float = 0.01
    stable_errors: float = 0.01
    first_bad_weight: int = 5


@dataclass(frozen=True)
class Outcome:
    """weight: at which the canary was rolled back, None if it was promoted. comparisons: made in all.
    requests: of the canary in its last step."""

    weight: int | None
    comparisons: int
    requests: float


def rollout(rng: np.random.Generator, scenario: Scenario) -> Outcome:
    """Play one rollout until promotion or rollback."""
    spec = CanarySpec(
        revision="canary", interval_seconds=_INTERVAL_S, min_requests=scenario.requests, steps=scenario.steps
    )
    state = decide(None, spec, 0.0, NOTHING, NOTHING).state
    made, sent, now = 0, 0.0, 0.0
    while state.weight < scenario.steps[-1] and made < _MOST_COMPARISONS:
        weight, now, made = state.weight, now + _INTERVAL_S, made + 1
        sent = sent + scenario.requests if state.undecided else float(scenario.requests)
        bad = weight >= scenario.first_bad_weight
        canary = _drawn(rng, scenario, scenario.requests, bad)
        stable = _drawn(rng, scenario, max(scenario.requests, scenario.requests * (100 - weight) // weight), None)
        state = decide(state, spec, now, canary, stable).state
        if state.rolled_back:
            return Outcome(weight, made, sent)
    return Outcome(None, made, sent)


def until_stopped(rng: np.random.Generator, share: float, stable_share: float, weight: int, most: int) -> int:
    """Return after how many of its requests a canary is stopped, deciding after each one; `most` if it never is."""
    spec = CanarySpec(revision="canary", min_requests=10 * most, steps=(weight, *(s for s in STEPS if s > weight)))
    state: CanaryState = decide(None, spec, 0.0, NOTHING, NOTHING).state
    for number in range(1, most + 1):
        error = float(rng.random() < share)
        others = max(1, (100 - weight) // weight)
        stable_errors = float(rng.binomial(others, stable_share))
        state = decide(
            state, spec, 1.0, Counters(1.0 - error, error), Counters(others - stable_errors, stable_errors)
        ).state
        if state.rolled_back:
            return number
    return most


def _drawn(rng: np.random.Generator, scenario: Scenario, count: int, bad: bool | None) -> Counters:
    """bad: whether the canary shows its regression; None: this is stable."""
    errors = int(rng.binomial(count, scenario.errors if bad else scenario.stable_errors))
    times = {"ttft": 0.3, "tpot": 0.02}
    drawn = {}
    for name, median in times.items():
        z = rng.standard_normal(count - errors)
        factor = 1.0
        if bad and name == scenario.measure:
            # 1.2816 is the 90 % quantile of a standard normal.
            factor = np.where(z > 1.2816, scenario.slowdown, 1.0) if scenario.tail_only else scenario.slowdown
        drawn[name] = factor * median * np.exp(scenario.sigma * z)
    return Counters(
        float(count - errors),
        float(errors),
        _buckets(drawn["ttft"], TTFT_BUCKETS),
        _buckets(drawn["tpot"], ITL_BUCKETS),
    )


def _buckets(values: np.ndarray, bounds: Sequence[float]) -> Buckets:
    at = np.cumsum(np.bincount(np.searchsorted(bounds, values), minlength=len(bounds) + 1))
    return dict(zip((*(str(float(bound)) for bound in bounds), "+Inf"), map(float, at), strict=True))


def interval(hits: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    z, share = 1.96, hits / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def false_alarms(rollouts: int, seed: int) -> None:
    print("| σ | steps | `minRequests` | rollouts | rolled back | 95 % interval | comparisons per step |")
    print("|--:|--|--:|--:|--:|--|--:|")
    rows = [(Scenario(), 5 * rollouts), (Scenario(steps=CHART_STEPS), rollouts)]
    rows += [(Scenario(sigma=sigma, requests=count), rollouts) for sigma in (0.4, 0.8, 1.2) for count in (500, 2000)]
    rows += [(Scenario(sigma=sigma), rollouts) for sigma in (0.4, 1.2)]
    for row, (scenario, count) in enumerate(rows):
        rng = np.random.default_rng([seed, row])
        outcomes = [rollout(rng, scenario) for _ in range(count)]
        back = sum(outcome.weight is not None for outcome in outcomes)
        low, high = interval(back, count)
        mean = sum(outcome.comparisons for outcome in outcomes) / count / (len(scenario.steps) - 1)
        print(
            f"| {scenario.sigma} | {', '.join(map(str, scenario.steps))} | {scenario.requests} | {count:,} | "
            f"{back / count:.2%} | {low:.2%} to {high:.2%} | {mean:.2f} |",
            flush=True,
        )


def detection(rollouts: int, seed: int) -> None:
    print("| regression | from weight | rolled back in that step | 95 % interval | of those, at the first comparison |")
    print("|--|--:|--:|--|--:|")
    base = Scenario()
    rows: list[tuple[str, Scenario]] = []
    for first in (5, 50):
        late = replace(base, first_bad_weight=first)
        rows += [(f"TTFT × {factor:g}", replace(late, slowdown=factor)) for factor in (1.25, 1.5, 2.0)]
        rows.append(("TPOT × 1.5", replace(late, slowdown=1.5, measure="tpot")))
        rows += [
            (f"slowest tenth, TTFT × {factor:g}", replace(late, slowdown=factor, tail_only=True))
            for factor in (1.5, 2.0)
        ]
        rows += [
            (f"{errors:.0%} of requests fail, of stable 1 %", replace(late, errors=errors))
            for errors in (0.03, 0.05, 0.10)
        ]
    for row, (name, scenario) in enumerate(rows):
        rng = np.random.default_rng([seed, 100 + row])
        outcomes = [rollout(rng, scenario) for _ in range(rollouts)]
        caught = [outcome for outcome in outcomes if outcome.weight == scenario.first_bad_weight]
        low, high = interval(len(caught), rollouts)
        first = sum(outcome.requests == scenario.requests for outcome in caught) / max(1, len(caught))
        print(
            f"| {name} | {scenario.first_bad_weight} % | {len(caught) / rollouts:.1%} | {low:.1%} to {high:.1%} | "
            f"{first:.0%} |",
            flush=True,
        )


def outright(runs: int, seed: int) -> None:
    print("| canary fails | stable fails | weight | stopped | requests until then, median | 95 % of runs |")
    print("|--:|--:|--:|--:|--:|--:|")
    cases: list[tuple[float, float, int]] = [(1.0, 0.0, 5), (0.8, 0.0, 5), (0.5, 0.0, 5), (0.5, 0.0, 50)]
    cases += [(0.2, 0.2, 5), (0.2, 0.2, 50), (0.5, 0.5, 5), (0.5, 0.5, 50)]
    for row, (share, stable_share, weight) in enumerate(cases):
        rng = np.random.default_rng([seed, 200 + row])
        stops = [until_stopped(rng, share, stable_share, weight, 300) for _ in range(runs)]
        stopped = sum(stop < 300 for stop in stops) / runs
        times = f"{np.median(stops):.0f} | {np.quantile(stops, 0.95):.0f}" if stopped > 0.95 else "– | –"
        print(f"| {share:.0%} | {stable_share:.0%} | {weight} % | {stopped:.1%} | {times} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000, help="the row of the defaults has five times as many")
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    for table in (false_alarms, detection, outright):
        table(arguments.rollouts, arguments.seed)
        print()


if __name__ == "__main__":
    main()
