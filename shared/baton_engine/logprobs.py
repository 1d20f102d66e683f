"""Logprobs of tokens, computed on a GPU without a softmax in memory."""

import torch

from baton_kernels.logprobs import chosen_logprobs

from .sampling import TokenLogprobs


def logprob_columns(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Return [R, 2 + 2 * most] float32 for a token of each row of logits [R, vocab], which is contiguous: its logprob
    and its rank, the ids of the `most` best tokens, and their logprobs."""
    chosen, ranks, norms = chosen_logprobs(logits, tokens)
    columns = [chosen.unsqueeze(1), ranks.unsqueeze(1)]
    if most:
        best, ids = logits.topk(most, dim=-1)
        columns += [ids, best.float() - norms[:, :1] - norms[:, 1:]]
    return torch.cat([column.float() for column in columns], dim=1)


def logprobs_of(token: int, values: list[float], count: int) -> TokenLogprobs:
    """Return a token's logprobs with its `count` best alternatives from its row of `logprob_columns`."""
    # Token ids and ranks are exact in float32: the vocabulary is smaller than 2^24.
    best, middle = values[2:], len(values) // 2 - 1
    ids = [int(id) for id in best[:middle]]
    return TokenLogprobs(token, values[0], int(values[1]), ids[:count], best[middle:][:count])
