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
    noise = gumbel_noise(seeds, positions, choices, logits.shape[-1])
    drawn = _scores(logits, temperatures, thresholds, noise).argmax(dim=-1)
    return torch.where(logits.amax(dim=-1) < float("inf"), drawn, NOT_FINITE)


def gumbel_best_reference(
    logits: torch.Tensor,
    first_token: int,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    choices: torch.Tensor,
) -> torch.Tensor:
    """Return the best score of some consecutive tokens, and its token: [R, 2] float32, which is exact for ids below
    2^24.

    logits: [R, tokens] of the tokens from first_token on, which is a multiple of 4. The other arguments are those of
    gumbel_argmax_reference, without thresholds. Without tokens the score is -inf. A row that has a NaN or +inf gets the
    score inf and NOT_FINITE.
    """
    count = logits.shape[1]
    if not count:
        return torch.tensor([float("-inf"), first_token], device=logits.device).repeat(len(logits), 1)
    noise = gumbel_noise(seeds, positions, choices, first_token + count)[:, first_token:]
    score, token = _scores(logits, temperatures, torch.full_like(temperatures, float("-inf")), noise).max(dim=-1)
    finite = logits.amax(dim=-1) < float("inf")
    score, token = torch.where(finite, score, float("inf")), torch.where(finite, token + first_token, NOT_FINITE)
    return torch.stack([score, token.float()], dim=1)


def best_of_shards_reference(found: torch.Tensor) -> torch.Tensor:
    """Return the token with the best score of each row, [R] int64. Of equal scores the smallest token wins.

    found: [R, 2 * shards] float32, the results of gumbel_best_reference for each shard of the vocabulary, side by side.
    """
    scores, tokens = found.view(len(found), -1, 2).unbind(dim=-1)
    best = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(best, tokens, float("inf")).amin(dim=1).long()


def _scores(
    logits: torch.Tensor, temperatures: torch.Tensor, thresholds: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    scores = logits.float().masked_fill(logits < thresholds.unsqueeze(1), float("-inf"))
    random = temperatures > 0
    divided = scores / torch.where(random, temperatures, 1.0).unsqueeze(1)
    return torch.where(random.unsqueeze(1), divided + noise, scores)
