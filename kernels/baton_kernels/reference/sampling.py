"""The draw of a token from logits, without a softmax: argmax of logits / temperature + Gumbel noise."""

import torch

from baton_kernels.not_finite import NOT_FINITE

from .philox import gumbel_noise


def gumbel_argmax_reference(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    thresholds: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
) -> torch.Tensor:
    """logits: [R, vocab]. temperatures: [R] float32, 0 = greedy. thresholds: [R] float32, tokens with a lower logit are
    not drawn. seeds: [R] int64 bits of an unsigned seed. positions, choices: [R] int64. Returns token ids [R] int64,
    NOT_FINITE for a row that has a NaN or +inf."""
    scores = logits.float().masked_fill(logits < thresholds.unsqueeze(1), float("-inf"))
    random = temperatures > 0
    noise = gumbel_noise(seeds, positions, choices, logits.shape[-1])
    divided = scores / torch.where(random, temperatures, 1.0).unsqueeze(1)
    drawn = torch.where(random.unsqueeze(1), divided + noise, scores).argmax(dim=-1)
    return torch.where(logits.amax(dim=-1) < float("inf"), drawn, NOT_FINITE)
