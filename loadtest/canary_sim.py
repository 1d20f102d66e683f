"""Simulates rollouts with the controller's own analysis: how often a canary is rolled back, by its slowdown.

`python -m loadtest.canary_sim --rollouts 1000` prints a table.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from baton_common.buckets import ITL_BUCKETS, TTFT_BUCKETS
from baton_controller.analysis import look
from baton_controller.config_file import CanarySpec
from baton_controller.counters import Buckets, Counters, Reading


def rollout(rng: np.random.Generator, sigma: float, requests: int, slowdown: float) -> int:
    """Return the step (from 1) at which the canary was rolled back; 0 if it was promoted. slowdown: of TTFT."""
    spec = CanarySpec(revision="canary", interval_seconds=60.0, min_requests=requests)
    totals = {"canary": _NONE, "stable": _NONE}
    state = look(None, spec, 0.0, {"gateway": Reading(1.0, dict(totals))}).state
    for number, weight in enumerate(spec.steps[:-1], 1):
        counts = {"canary": requests, "stable": max(requests, requests * (100 - weight) // weight)}
        for name, count in counts.items():
            scale = slowdown if name == "canary" else 1.0
            totals[name] = _plus(totals[name], _drawn(rng, sigma, count, scale))
        state = look(state, spec, 60.0 * number, {"gateway": Reading(1.0, dict(totals))}).state
        if state.rolled_back:
            return number
    return 0


def _drawn(rng: np.random.Generator, sigma: float, count: int, scale: float) -> Counters:
    ttft = scale * 0.3 * rng.lognormal(0.0, sigma, count)
    tpot = 0.02 * rng.lognormal(0.0, sigma, count)
    return Counters(float(count), 0.0, _buckets(ttft, TTFT_BUCKETS), _buckets(tpot, ITL_BUCKETS))


def _buckets(values: np.ndarray, bounds: Sequence[float]) -> Buckets:
    at = np.searchsorted(np.sort(values), bounds, side="right")
    return {
        **{str(float(bound)): float(count) for bound, count in zip(bounds, at, strict=True)},
        "+Inf": float(values.size),
    }


def _plus(one: Counters, other: Counters) -> Counters:
    return Counters(
        one.ok + other.ok,
        one.error + other.error,
        {le: count + one.ttft.get(le, 0.0) for le, count in other.ttft.items()},
        {le: count + one.tpot.get(le, 0.0) for le, count in other.tpot.items()},
    )


_NONE = Counters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.4, 0.8, 1.2])
    parser.add_argument("--requests", type=int, nargs="+", default=[200, 500])
    count = (arguments := parser.parse_args()).rollouts
    print("| σ | requests | slowdown | rolled back | in the first step |\n|--:|--:|--:|--:|--:|")
    for sigma in arguments.sigmas:
        for requests in arguments.requests:
            for slowdown in (1.0, 1.25, 1.5, 2.0):
                rng = np.random.default_rng(7)
                steps = [rollout(rng, sigma, requests, slowdown) for _ in range(count)]
                back, first = sum(step > 0 for step in steps) / count, steps.count(1) / count
                print(f"| {sigma} | {requests} | {slowdown} | {back:.1%} | {first:.1%} |", flush=True)


if __name__ == "__main__":
    main()
