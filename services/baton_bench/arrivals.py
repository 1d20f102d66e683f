"""Arrival times of requests in seconds from the start, without end or for a given duration."""

import random
from collections.abc import Iterable, Iterator


def gamma_arrivals(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Yield arrivals with a mean of `rate` a second and gamma-distributed gaps of shape `burstiness`.

    1 is a Poisson process; less comes in bursts, more evenly. The squared coefficient of variation is 1 / burstiness.
    """
    due = 0.0
    while True:
        due += rng.gammavariate(burstiness, 1 / (rate * burstiness))
        yield due


def step_arrivals(steps: Iterable[tuple[float, float]], burstiness: float, rng: random.Random) -> Iterator[float]:
    """Yield the arrivals of one rate after the other. steps: (rate, seconds)."""
    start = 0.0
    for rate, seconds in steps:
        for due in gamma_arrivals(rate, burstiness, rng):
            if due >= seconds:
                break
            yield start + due
        start += seconds
