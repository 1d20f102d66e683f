"""The benchmark of killed ranks: which token is the first of the other pod."""

import pytest

from loadtest.handover.killed_rank_bench import pause


@pytest.mark.parametrize(
    ("arrivals", "seconds"),
    [
        ([9.0, 9.5, 10.5, 10.6], 0.5),
        ([9.0, 10.01, 10.02, 11.0, 11.1], 1.0),  # two tokens were on their way
    ],
)
def test_the_pause_ends_with_the_first_token_of_the_other_pod(arrivals: list[float], seconds: float) -> None:
    assert pause(10.0, arrivals) == pytest.approx(seconds)
