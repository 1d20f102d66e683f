"""From how many tokens on a padded step is faster with CUDA graphs."""

import pytest

from baton_engine.token_graphs import fewest_tokens


@pytest.mark.parametrize(
    ("smaller", "size", "replayed", "fewest"),
    [
        # Launches take 6 ms whatever the number of tokens, and the graphs take less.
        ((128, 6.0), (192, 6.0), 4.0, 129),
        # The device is busy throughout: 1,536 tokens take half as long again as 1,024, with or without graphs.
        ((1024, 24.0), (1536, 36.0), 35.0, 1024 + 1 + int(512 * 11 / 12)),
        ((1024, 24.0), (1536, 36.0), 36.0, 1537),
        ((1024, 24.0), (1536, 36.0), 37.0, 1537),
        # Without graphs, 256 tokens took less time than 192, which is noise.
        ((192, 6.0), (256, 5.0), 5.5, 257),
        ((192, 6.0), (256, 5.0), 4.5, 193),
        # Nothing smaller was measured.
        ((0, 6.0), (16, 6.0), 3.0, 1),
        ((0, 6.0), (16, 6.0), 6.0, 17),
    ],
)
def test_graphs_are_replayed_where_they_are_faster(
    smaller: tuple[int, float], size: tuple[int, float], replayed: float, fewest: int
) -> None:
    assert fewest_tokens(smaller, size, replayed) == fewest


def test_where_the_graphs_are_as_fast_as_a_step_between_the_sizes() -> None:
    """At the returned number of tokens the graphs are faster, and at one token fewer they are not."""
    (least, shortest), (most, longest) = (512, 12.0), (768, 17.0)
    for replayed in (12.0, 13.7, 15.0, 16.9):
        fewest = fewest_tokens((least, shortest), (most, longest), replayed)
        at = [shortest + (longest - shortest) * (count - least) / (most - least) for count in (fewest - 1, fewest)]
        assert at[0] <= replayed < at[1]
