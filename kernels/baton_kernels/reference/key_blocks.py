"""The indexer of MiniMax M3 (MiniMax, 2026) in plain torch, which selects blocks of keys for grouped-query attention.

Consecutive tokens of a sequence form blocks of keys, from its first token on. They are independent of the blocks of the
paged cache. Each key-value head has an index query for each token, and all heads share the index key of a token. The
score of a block is the largest product of the query with an index key of the block. The query heads of a key-value head
attend to the keys of the blocks with the highest scores alone.
"""

import torch
from torch.nn import functional

from .indexed import LARGEST_SCORE, selection_reference


def key_block_scores_reference(
    q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, size: int, local: int
) -> torch.Tensor:
    """Return the scores of blocks of keys, [..., T, heads, blocks] float32; -inf for a block of which no key is seen.

    q: [..., T, heads, dim], index queries. keys: [..., K, dim], the index keys of a sequence from its first token on.
    seen: [..., T, K] bool, the keys up to that of the query itself. size: keys of a block. local: blocks with the
    highest score, inf, whatever their keys are: the query's own and those before it.
    """
    wide, blocks = keys.float().transpose(-2, -1), -(-keys.shape[-2] // size)
    missing = blocks * size - keys.shape[-2]
    each = []
    # One head at a time, as the products of all heads would take too much memory.
    for head in range(q.shape[-2]):
        products = (q[..., head, :].float() @ wide).nan_to_num_(LARGEST_SCORE, LARGEST_SCORE, -LARGEST_SCORE)
        products = products.clamp_(-LARGEST_SCORE, LARGEST_SCORE).masked_fill_(~seen, float("-inf"))
        padded = functional.pad(products, (0, missing), value=float("-inf"))
        each.append(padded.unflatten(-1, (blocks, size)).amax(dim=-1))
    own = (seen.sum(dim=-1, keepdim=True) - 1) // size
    numbers = torch.arange(blocks, device=q.device)
    is_local = (numbers <= own) & (numbers > own - local)
    return torch.stack(each, dim=-2).masked_fill_(is_local.unsqueeze(-2), float("inf"))


def key_block_selection_reference(scores: torch.Tensor, seen: torch.Tensor, size: int, most: int) -> torch.Tensor:
    """Return which keys each head of a query attends to, [..., T, heads, K] bool: the seen keys of the `most` blocks
    with the highest scores, or all seen keys if there are fewer blocks. Of blocks with one score, earlier ones are
    selected first.

    scores, seen, size: as in key_block_scores_reference, of which `scores` is the result.
    """
    chosen = selection_reference(scores, scores > float("-inf"), most)
    return chosen.repeat_interleave(size, dim=-1)[..., : seen.shape[-1]] & seen.unsqueeze(-2)
