"""Rollouts with the controller's own analysis: seldom a false alarm, and regressions are found in their step."""

from dataclasses import replace

import numpy as np
import pytest

from loadtest.scaling.canary_sim import Scenario, interval, rollout, until_stopped

DEFAULT = Scenario(sigma=0.8)


def weights(scenario: Scenario, count: int) -> list[int | None]:
    rng = np.random.default_rng(1)
    return [rollout(rng, scenario).weight for _ in range(count)]


def test_identical_canaries_are_promoted() -> None:
    """Comparing two p95 by their ratio alone would roll back more than half of them."""
    for requests in (200, 300):
        assert sum(weight is not None for weight in weights(replace(DEFAULT, requests=requests), 150)) <= 4


@pytest.mark.parametrize("measure", ["ttft", "tpot"])
@pytest.mark.parametrize("first", [5, 50])
def test_a_regression_is_found_in_the_step_where_it_appears(measure: str, first: int) -> None:
    worse = replace(DEFAULT, measure=measure, slowdown=1.5, first_bad_weight=first)
    assert weights(worse, 60).count(first) >= 57


def test_a_canary_that_fails_always_is_stopped_within_ten_requests() -> None:
    assert until_stopped(np.random.default_rng(1), 1.0, 0.0, 5, 300) <= 10
    assert until_stopped(np.random.default_rng(1), 0.5, 0.5, 50, 300) == 300


def test_the_interval_of_a_share() -> None:
    assert interval(0, 100) == (0.0, pytest.approx(0.037, abs=0.001))
    assert interval(50, 100) == (pytest.approx(0.404, abs=0.001), pytest.approx(0.596, abs=0.001))
