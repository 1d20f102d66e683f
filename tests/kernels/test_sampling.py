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
    noise = gumbel_noise(seeds, positions, choices, vocab).double()
    scores = torch.where(temperatures[:, None] > 0, logits / temperatures[:, None].clamp(min=0.1) + noise, logits)
    scores = scores.masked_fill(logits < thresholds[:, None], float("-inf"))
    # The logarithms of the two may be rounded to neighbours, which decides only between scores that are as close.
    for found in (drawn, gumbel_argmax_reference(*arguments)):
        assert (scores.gather(1, found[:, None])[:, 0] > scores.amax(dim=1) - 4e-6).all()
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
