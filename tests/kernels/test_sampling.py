"""The fused draw against the reference, and against the distribution that it must follow."""

import pytest
import torch

from baton_kernels.not_finite import NOT_FINITE
from baton_kernels.reference.philox import gumbel_noise
from baton_kernels.reference.sampling import (
    best_of_shards_reference,
    gumbel_argmax_reference,
    gumbel_best_reference,
)
from baton_kernels.sampling import best_of_shards, gumbel_argmax, gumbel_best


def assert_the_same(
    drawn: torch.Tensor,
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    thresholds: torch.Tensor,
    *draws: torch.Tensor,
) -> None:
    """Check that the reference draws the same tokens, or others whose scores are equal but for rounding.

    A kernel and torch may round a logarithm to neighbours. The arguments are those of gumbel_argmax_reference.
    """
    expected = gumbel_argmax_reference(logits, temperatures, thresholds, *draws)
    other = drawn != expected
    assert not (other & ((temperatures == 0) | (drawn < 0) | (expected < 0))).any()
    scores = logits / temperatures[:, None] + gumbel_noise(*draws, logits.shape[1]).double()
    scores = scores.masked_fill(logits < thresholds[:, None], float("-inf"))[other]
    found, best = (scores.gather(1, each[other, None]) for each in (drawn, expected))
    assert (found > best - 4e-6).all()


def test_draws_the_same_tokens_as_the_reference(device: torch.device) -> None:
    rows, vocab = 6, 5001
    logits = torch.randn(rows, vocab, device=device)
    temperatures = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.0], device=device)
    thresholds = torch.full((rows,), float("-inf"), device=device)
    thresholds[4] = 2.0
    seeds = torch.randint(-(2**62), 2**62, (rows,), device=device)
    positions = torch.randint(0, 1 << 20, (rows,), device=device)
    choices = torch.arange(rows, device=device)
    arguments = (logits, temperatures, thresholds, seeds, positions, choices)
    drawn = gumbel_argmax(*arguments)
    assert_the_same(drawn, *arguments)
    assert drawn[0] == logits[0].argmax()
    assert logits[4, drawn[4]] >= 2.0
    for parts in (1, 4):
        assert torch.equal(gumbel_argmax(*arguments, parts=parts), drawn)


@pytest.mark.parametrize("shards", [1, 3])
def test_the_best_of_shards_is_the_token_of_all_logits(shards: int, device: torch.device) -> None:
    """Also of equal logits, in one shard and in two, and where logits are not finite, or all -inf."""
    rows, vocab, each = 9, 5003, -(-5003 // (4 * shards)) * 4
    logits = torch.randn(rows, vocab, device=device)
    logits[1, [7, 11, vocab - 1]] = 9.0
    logits[2, [1800, vocab - 1]] = 9.0
    logits[3, vocab - 1] = float("nan")
    logits[4, [5, vocab - 2]] = float("inf")
    logits[5] = float("-inf")
    temperatures = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.5, 2.0], device=device)
    seeds = torch.randint(-(2**62), 2**62, (rows,), device=device)
    positions = torch.randint(0, 1 << 20, (rows,), device=device)
    columns = temperatures, seeds, positions, torch.arange(rows, device=device)
    least = torch.full((rows,), float("-inf"), device=device)
    parts = [(first, logits[:, first : first + each].contiguous()) for first in range(0, vocab, each)]
    assert_the_same(gumbel_argmax(logits, temperatures, least, *columns[1:]), logits, temperatures, least, *columns[1:])
    for argmax, best, of_shards in (
        (gumbel_argmax, gumbel_best, best_of_shards),
        (gumbel_argmax_reference, gumbel_best_reference, best_of_shards_reference),
    ):
        expected = argmax(logits, temperatures, least, *columns[1:])
        assert expected.tolist()[1:6] == [7, 1800, NOT_FINITE, NOT_FINITE, 0]
        found = torch.cat([best(part, first, *columns) for first, part in parts], dim=1)
        assert of_shards(found).tolist() == expected.tolist()


def test_a_shard_without_tokens_has_no_best_one(device: torch.device) -> None:
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    nothing = torch.empty(2, 0, device=device), 8, torch.ones(2, device=device), zeros, zeros, zeros
    for best in (gumbel_best, gumbel_best_reference):
        assert best(*nothing).tolist() == [[float("-inf"), 8.0]] * 2
