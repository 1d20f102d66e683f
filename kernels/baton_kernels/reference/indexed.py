"""The indexer of DeepSeek's sparse attention (DeepSeek-AI, "DeepSeek-V3.2", 2025) in plain torch.

Attention of a query goes over only the keys that an indexer scores highest. The indexer has a small key of each
token in the cache, and some query heads. The score of a key is the weighted sum of relu(query · key) over these heads.
"""

import torch
from torch.nn import functional

from .latent import rotate

# Scores are kept within this bound, and one that is not a number gets the bound, so that every key has a rank.
LARGEST_SCORE = 3.0e38


def index_rope_and_cache_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    interleaved: bool,
    positions: torch.Tensor,
    slots: torch.Tensor,
    index_keys: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Rotate the beginnings of index queries and keys, and write the keys to their slots of the cache.

    q: [T, heads * dim]. k: [T, dim]. weight, bias: [dim] of the LayerNorm of keys, which comes before the rotation.
    rotary, interleaved, positions, slots: as in latent_rope_and_cache_reference; the tables have as many columns as
    pairs are rotated, and the elements after these pairs stay as they are. index_keys: [blocks, block_size, 1, dim],
    written in place. Returns the queries [T, heads, dim].
    """
    cos, sin = (table[positions].unsqueeze(1) for table in rotary)
    rotated = 2 * cos.shape[2]
    normed = functional.layer_norm(k.float(), k.shape[1:], weight.float(), bias.float(), eps).to(k.dtype)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([rotate(x[..., :rotated], cos, sin, interleaved), x[..., rotated:]], dim=-1)

    kept = slots >= 0
    index_keys.flatten(0, 2).index_copy_(0, slots[kept], turn(normed[:, None])[kept, 0])
    return turn(q.unflatten(1, (num_heads, -1)))


def index_scores_reference(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the scores of keys, [..., T, K] float32.

    q: [..., T, heads, dim]. weights: [..., T, heads] float32. keys: [..., K, dim].
    """
    wide, scores = keys.float().transpose(-2, -1), torch.zeros(1, device=q.device)
    # One head at a time, as the products of all heads would take too much memory.
    for head in range(q.shape[-2]):
        products = (q[..., head, :].float() @ wide).relu_()
        scores = scores + products.mul_(weights[..., head, None])
    return scores.nan_to_num_(LARGEST_SCORE, LARGEST_SCORE, -LARGEST_SCORE).clamp_(-LARGEST_SCORE, LARGEST_SCORE)


def selection_reference(scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
    """Return which keys a query's attention goes over, [..., K] bool: the `most` seen ones with the highest scores, or
    all if there are fewer. Of keys with one score, earlier ones are selected first.

    scores: [..., K] float32, from index_scores_reference. seen: [..., K] bool.
    """
    if scores.shape[-1] <= most:
        return seen
    scores = scores.masked_fill(~seen, float("-inf"))
    least = scores.topk(most, dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    room = most - above.sum(dim=-1, keepdim=True)
    return seen & (above | (equal & (equal.cumsum(dim=-1) <= room)))
