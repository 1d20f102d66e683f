"""Statistical tests of whether a canary is worse than stable, on counts and on bucketed histograms.

Every test answers one question: how likely is a difference at least this large if both revisions are the same? So the
stated false-alarm rate holds for a canary that is identical to stable. A canary that is slightly worse than stable, but
within its limits, is rolled back more often, because its measured ratio can exceed the limit by chance.

The tests assume that requests are independent. Requests of one burst are correlated, which makes false alarms more
frequent than stated.
"""

from itertools import pairwise
from math import erfc, exp, inf, lgamma, log, log1p, pi, sqrt

from baton_controller.counters import Buckets, quantile

FALSE_ALARM_RATE = 0.01  # the chance that a whole rollout of an identical canary is rolled back
OUTRIGHT_SHARE = 0.2  # a canary fails outright when more than this share of its requests fails, with confidence
_TESTS = 6  # in each comparison: TTFT and TPOT, each as a whole and in the tail; errors; the outright failure
_TAIL_SHARE = 0.05
_LARGEST_EXACT_VARIANCE = 1e6  # above it the normal approximation is as exact, and the sum would be long


def level(steps: int, comparison: int) -> float:
    """Return the false-alarm rate allowed to one test in a comparison, which is counted from 1 at each step.

    FALSE_ALARM_RATE is divided by steps and tests (Bonferroni), and within a step by k (k + 1), whose inverses sum to
    1 over all k. So the rate of the rollout holds however many comparisons are made at a step.
    """
    return FALSE_ALARM_RATE / (_TESTS * steps * comparison * (comparison + 1))


def fisher(bad: float, of: float, stable_bad: float, stable_of: float) -> float:
    """Return the p-value of Fisher's exact test, one-sided: small when the canary's share is larger than stable's."""
    k, n, j, m = round(bad), round(of), round(stable_bad), round(stable_of)
    if n <= 0 or m <= 0:
        return 1.0
    drawn, total = k + j, n + m
    mean = drawn * n / total
    variance = mean * (m / total) * (total - drawn) / max(total - 1, 1)
    if variance > _LARGEST_EXACT_VARIANCE:
        return _normal_tail((k - 0.5 - mean) / sqrt(variance))
    # Each sum runs away from the mean, where the terms only shrink.
    if k > mean:
        return min(1.0, _upper_sum(k, n, drawn, total))
    return max(0.0, 1.0 - _upper_sum(drawn - k + 1, m, drawn, total))


def fails_outright(errors: float, of: float, stable_errors: float, stable_of: float, limit: float, rate: float) -> bool:
    """Return whether a larger share of the canary's requests fails than is tolerable in any revision.

    The tolerated share is OUTRIGHT_SHARE. When stable itself exceeds it, as when a shared dependency is down, it is
    the upper confidence bound of stable's share. `limit` is the increase over stable that the operator allows.
    The canary's share must be above it with a confidence that holds at all times at once. So it can be tested after
    every request: the chance of one wrong answer in all of them is `rate`, for a true share of up to OUTRIGHT_SHARE.
    It needs no traffic on stable.
    """
    others = _highest_share(stable_errors, stable_of, rate / 2) if stable_errors > OUTRIGHT_SHARE * stable_of else 0.0
    tolerated = max(OUTRIGHT_SHARE, others + limit)
    return errors > tolerated * of and _evidence(errors, of, tolerated) >= -log(rate / 2)


def slower(canary: Buckets, stable: Buckets) -> float:
    """Return the p-value of the Mann-Whitney test, one-sided, corrected for ties: small when the canary is slower."""
    mine, others = per_bucket(canary), per_bucket(stable)
    n, m = sum(mine.values()), sum(others.values())
    below = wins = ties = 0.0
    for bound in sorted(mine.keys() | others.keys()):
        here, there = mine.get(bound, 0.0), others.get(bound, 0.0)
        wins += here * (below + there / 2)
        below += there
        tied = here + there
        ties += tied * tied * tied - tied
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / max(total * (total - 1), 1.0))
    return _normal_tail((wins - n * m / 2) / sqrt(variance)) if variance > 0 else 1.0


def tail(canary: Buckets, stable: Buckets) -> float:
    """Return Fisher's p-value that the canary has no larger share than stable among the slowest requests.

    The slowest requests are those above the bucket bound that cuts off about 5 % of both revisions together. The bound
    depends only on that sum, so that the test stays exact: an identical canary's part of the sum is a random draw.
    """
    mine, others = per_bucket(canary), per_bucket(stable)
    n, m = sum(mine.values()), sum(others.values())
    above = slow_canary = slow_stable = 0.0
    best, p_value = inf, 1.0
    for bound in sorted(mine.keys() | others.keys(), reverse=True):
        slow_canary += mine.get(bound, 0.0)
        slow_stable += others.get(bound, 0.0)
        above = slow_canary + slow_stable
        if not 0 < above < n + m:
            continue
        distance = abs(log(above / (n + m) / _TAIL_SHARE))
        if distance < best:
            best, p_value = distance, fisher(slow_canary, n, slow_stable, m)
    return p_value


def ratio(canary: Buckets, stable: Buckets) -> float:
    """Return how many times slower the canary is: the geometric mean over its quantiles from 10 to 90 %."""
    logs = []
    for percent in range(10, 95, 5):
        mine, others = quantile(canary, percent / 100), quantile(stable, percent / 100)
        if mine and others:
            logs.append(log(mine / others))
    return exp(sum(logs) / len(logs)) if logs else 1.0


def per_bucket(buckets: Buckets) -> dict[float, float]:
    """Return how many observations each bucket itself has, by its upper bound."""
    counts = [(0.0, 0.0), *sorted((float(le), count) for le, count in buckets.items())]
    return {bound: max(0.0, count - before) for (_, before), (bound, count) in pairwise(counts)}


def _evidence(bad: float, of: float, share: float) -> float:
    """Return the log of the likelihood ratio of a Beta(1/2, 1/2) mixture of shares to `share`.

    Robbins 1970: for a true share of `share` the ratio ever exceeds 1 / rate with a probability of at most `rate`.
    """
    if share >= 1:
        return -inf if bad >= of else inf
    mixture = lgamma(bad + 0.5) + lgamma(of - bad + 0.5) - lgamma(of + 1) - log(pi)
    return mixture - bad * log(share) - (of - bad) * log1p(-share)


def _highest_share(bad: float, of: float, rate: float) -> float:
    """Return the upper bound of a share with a confidence of 1 - rate that holds at all times at once."""
    low, high = bad / of, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _evidence(bad, of, middle) < -log(rate) else (low, middle)
    return high


def _upper_sum(k: int, n: int, drawn: int, total: int) -> float:
    """Return the hypergeometric chance of at least k among n of total, when `drawn` are drawn; k is above the mean."""
    if k > min(n, drawn):
        return 0.0
    term = exp(_log_choose(n, k) + _log_choose(total - n, drawn - k) - _log_choose(total, drawn))
    result = 0.0
    while term > result * 1e-12:
        result += term
        term *= (n - k) * (drawn - k) / ((k + 1) * (total - n - drawn + k + 1))
        k += 1
    return result


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) if 0 <= k <= n else -inf


def _normal_tail(z: float) -> float:
    return erfc(z / sqrt(2)) / 2
