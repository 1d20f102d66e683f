"""The tests of whether a canary is worse, against exact enumeration and simulated rollouts."""

import itertools
import math

import numpy as np
import pytest

from baton_controller import evidence
from baton_controller.counters import Buckets


def cumulative(counts: list[int]) -> Buckets:
    bounds = [str(2.0**i) for i in range(len(counts) - 1)] + ["+Inf"]
    return dict(zip(bounds, map(float, itertools.accumulate(counts)), strict=True))


def hypergeometric(k: int, n: int, j: int, m: int) -> float:
    drawn = k + j
    ways = sum(math.comb(n, i) * math.comb(m, drawn - i) for i in range(k, min(n, drawn) + 1) if drawn - i <= m)
    return ways / math.comb(n + m, drawn)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 9), (12, 4), (7, 60)])
def test_fisher_is_the_exact_sum(n: int, m: int) -> None:
    for k, j in itertools.product(range(n + 1), range(m + 1)):
        assert evidence.fisher(k, n, j, m) == pytest.approx(hypergeometric(k, n, j, m), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("k", "n", "j", "m"), [(13, 300, 0, 300), (9, 300, 40, 5700), (600, 9000, 500, 9000)])
def test_fisher_is_exact_far_out(k: int, n: int, j: int, m: int) -> None:
    assert evidence.fisher(k, n, j, m) == pytest.approx(hypergeometric(k, n, j, m), rel=1e-6)


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (5e14, 1e15, 5e14, 1e15), (2.0**53, 2.0**53, 0, 2.0**53)])
def test_fisher_takes_any_counts_at_once(counts: tuple[float, float, float, float]) -> None:
    assert 0 <= evidence.fisher(*counts) <= 1


def test_fisher_is_continuous_where_the_normal_approximation_begins() -> None:
    n = 4_050_000  # a variance just above the largest exact one, with a share of one half
    for excess in (0, 3000, 6000):
        approximated = evidence.fisher(n / 2 + excess, n, n / 2, n)
        z = excess / 2 / math.sqrt(n / 8)
        assert approximated == pytest.approx(math.erfc(z / math.sqrt(2)) / 2, rel=0.05)


def test_mann_whitney_has_the_variance_of_all_permutations() -> None:
    """With three buckets, against the permutation distribution drawn at random."""
    rng = np.random.default_rng(3)
    canary, stable = [20, 14, 16], [40, 20, 10]
    pooled = np.repeat([0, 1, 2], [c + s for c, s in zip(canary, stable, strict=True)])
    drawn = []
    for _ in range(20_000):
        part = np.bincount(rng.permutation(pooled)[: sum(canary)], minlength=3).tolist()
        drawn.append(sum(_midranks(canary, stable, part)))
    observed = sum(_midranks(canary, stable, canary))
    exact = float(np.mean(np.array(drawn) >= observed))
    assert evidence.slower(cumulative(canary), cumulative(stable)) == pytest.approx(exact, rel=0.2)


def _midranks(canary: list[int], stable: list[int], part: list[int]) -> list[float]:
    below, sums = 0.0, []
    for here, there, count in zip(canary, stable, part, strict=True):
        sums.append(count * (below + (here + there + 1) / 2))
        below += here + there
    return sums


@pytest.mark.parametrize("test", [evidence.slower, evidence.tail])
def test_equal_counts_prove_nothing(test: object) -> None:
    for counts in ([0, 0, 0], [5, 0, 0], [0, 0, 7], [10, 20, 5]):
        assert test(cumulative(counts), cumulative(counts)) >= 0.4  # type: ignore[operator]
    assert test({}, {}) == 1.0  # type: ignore[operator]


@pytest.mark.parametrize("slow_share", [0.01, 0.05, 0.3])
def test_the_tail_of_identical_canaries_is_seldom_slower(slow_share: float) -> None:
    """Although the test chooses the bucket bound from the same requests, its false-alarm rate holds."""
    rng = np.random.default_rng(5)
    shares = [1 - 2 * slow_share, slow_share, slow_share / 2, slow_share / 2]
    alarms = sum(
        evidence.tail(
            cumulative(rng.multinomial(200, shares).tolist()), cumulative(rng.multinomial(900, shares).tolist())
        )
        < 0.05
        for _ in range(2000)
    )
    assert alarms / 2000 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_the_outright_failure_is_seldom_seen_at_any_time_where_there_is_none() -> None:
    rng = np.random.default_rng(6)
    rate, alarms, runs = 0.05, 0, 500
    for _ in range(runs):
        errors = np.cumsum(rng.random(300) < evidence.OUTRIGHT_SHARE)
        alarms += any(evidence.fails_outright(float(e), n, 0, n, 0.01, rate) for n, e in enumerate(errors, 1))
    assert alarms / runs <= rate


@pytest.mark.parametrize(
    ("canary", "stable", "limit", "fails"),
    [
        ((0, 0), (0, 0), 0.01, False),
        ((6, 6), (0, 0), 0.01, False),
        ((8, 8), (0, 0), 0.01, True),
        ((8, 8), (150, 152), 0.01, False),
        ((300, 300), (0, 3), 0.01, True),
        ((300, 300), (150, 300), 0.01, True),
        ((300, 300), (0, 300), 1.0, False),
        ((2.0**53, 2.0**53), (2.0**53, 2.0**53), 0.0, False),
    ],
)
def test_outright_failures(canary: tuple[float, float], stable: tuple[float, float], limit: float, fails: bool) -> None:
    assert evidence.fails_outright(*canary, *stable, limit, evidence.level(4, 1)) is fails
