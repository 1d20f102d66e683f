"""Tests of whether a canary is worse than stable, on counts and on bucketed histograms.

They assume independent requests. Requests of one burst are correlated, so bursts make false alarms more frequent.
"""

from itertools import pairwise
from math import erfc, exp, inf, lgamma, log, sqrt

from baton_controller.counters import Buckets, quantile

FALSE_ALARM_RATE = 0.01  # of a whole rollout of an identical canary
_TESTS = 6  # at each step: shift and tail of TTFT and of TPOT, errors, and the outright failure
_OUTRIGHT_SHARE = 0.2
_FAILING_SHARES = (0.4, 0.6, 0.8, 0.95)


def level(steps: int) -> float:
    """Return the false-alarm rate of one test at one step (Bonferroni over all tests of a rollout)."""
    return FALSE_ALARM_RATE / (_TESTS * steps)


def fisher(bad: float, of: float, stable_bad: float, stable_of: float) -> float:
    """Return the one-sided p-value of Fisher's exact test that the canary's share is not higher than stable's."""
    k, n, j, m = round(bad), round(of), round(stable_bad), round(stable_of)
    whole = _log_choose(n + m, k + j)
    return min(
        1.0, sum(exp(_log_choose(n, i) + _log_choose(m, k + j - i) - whole) for i in range(k, min(n, k + j) + 1))
    )


def fails_outright(errors: float, of: float, stable_errors: float, stable_of: float, limit: float, rate: float) -> bool:
    """Return whether the canary's failures, at any number of looks, refute a share that could be tolerated.

    A mixture of likelihood ratios exceeds 1 / rate at any time with a probability of at most `rate` (Ville).
    The tolerated share is stable's, shrunk towards one half, and the limit; never less than 20 %.
    """
    tolerated = max(_OUTRIGHT_SHARE, (stable_errors + 1) / (stable_of + 2) + limit)
    ratios = [
        errors * log(share / tolerated) + (of - errors) * log((1 - share) / (1 - tolerated))
        for share in _FAILING_SHARES
        if share > tolerated
    ]
    # The largest part alone is a lower bound of the mixture.
    return max(ratios, default=-inf) - log(len(_FAILING_SHARES)) >= -log(rate)


def slower(canary: Buckets, stable: Buckets) -> float:
    """Return the one-sided p-value of the Mann-Whitney test, ties corrected, that the canary is not slower."""
    mine, others = _per_bucket(canary), _per_bucket(stable)
    n, m = sum(mine.values()), sum(others.values())
    if n <= 0 or m <= 0:
        return 1.0
    below = wins = ties = 0.0
    for bound in sorted(mine.keys() | others.keys()):
        here, there = mine.get(bound, 0.0), others.get(bound, 0.0)
        wins += here * (below + there / 2)
        below += there
        ties += (here + there) ** 3 - (here + there)
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / (total * max(total - 1, 1)))
    return 1.0 if variance <= 0 else erfc((wins - n * m / 2) / sqrt(2 * variance)) / 2


def tail(canary: Buckets, stable: Buckets, seconds: float) -> float:
    """Return the p-value that no larger share of the canary's than of stable's is above the bucket of `seconds`."""
    bound = max((float(le) for le in stable if float(le) <= seconds), default=0.0)
    mine, others = _per_bucket(canary), _per_bucket(stable)
    return fisher(
        sum(count for le, count in mine.items() if le > bound),
        sum(mine.values()),
        sum(count for le, count in others.items() if le > bound),
        sum(others.values()),
    )


def ratio(canary: Buckets, stable: Buckets) -> float:
    """Return how many times slower the canary is over its quantiles from 10 to 90 %: the geometric mean."""
    logs = []
    for percent in range(10, 95, 5):
        mine, others = quantile(canary, percent / 100), quantile(stable, percent / 100)
        if mine and others:
            logs.append(log(mine / others))
    return exp(sum(logs) / len(logs)) if logs else 1.0


def _per_bucket(buckets: Buckets) -> dict[float, float]:
    counts = [(0.0, 0.0), *sorted((float(le), count) for le, count in buckets.items())]
    return {bound: max(0.0, count - before) for (_, before), (bound, count) in pairwise(counts)}


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) if 0 <= k <= n else -inf
