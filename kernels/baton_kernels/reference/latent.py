"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) over the paged cache in plain torch.

The cache holds one latent vector per token for all heads. Each head's key and value are linear functions of its first
`rank` elements, with the weights `up`, [heads, key_dim + value_dim, rank]. The `rope_dim` rotated elements after these
are the end of each head's key. The weights can be used in two ways with the same result:

- expanded: keys and values of all heads are computed from the latents, and attention goes over these.
- absorbed: the queries are multiplied with the weights of the keys, attention goes over the latents themselves, and its
  results are multiplied with the weights of the values.
"""

import torch

from .norm import add_rms_norm_reference


def latent_rope_and_cache_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    interleaved: bool,
    positions: torch.Tensor,
    slots: torch.Tensor,
    latents: torch.Tensor,
    num_heads: int,
    out: torch.Tensor | None = None,
    rope_norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the ends of queries and keys, norm the latents, and write them to their slots of the cache.

    q: [T, heads * (key_dim + rope_dim)]. kv: [T, rank + rope_dim]. norm: weight [rank] of the RMS norm. rotary: cosines
    and sines, [positions, rope_dim / 2] float32 each. interleaved: the inputs hold the two elements of each pair side
    by side; otherwise element i pairs with i + rope_dim / 2, as it always does in the results. positions: [T] int.
    slots: [T] int64, block * block_size + offset; nothing is written for a negative slot. latents: [blocks, block_size,
    1, rank + rope_dim], written in place. rope_norm: weight [rope_dim] of an RMS norm of the keys' ends before their
    rotation; None = there is none. Returns the queries [T, heads, key_dim + rope_dim], in out when given.
    """
    rank, rope_dim = len(norm), kv.shape[1] - len(norm)
    cos, sin = (table[positions].unsqueeze(1) for table in rotary)
    heads = q.unflatten(1, (num_heads, -1))
    key_dim = heads.shape[2] - rope_dim
    rotated = torch.cat([heads[..., :key_dim], rotate(heads[..., key_dim:], cos, sin, interleaved)], dim=-1)
    normed = add_rms_norm_reference(kv[:, :rank], None, norm, eps)
    ends = kv[:, rank:] if rope_norm is None else add_rms_norm_reference(kv[:, rank:], None, rope_norm, eps)
    latent = torch.cat([normed, rotate(ends[:, None], cos, sin, interleaved)[:, 0]], dim=-1)
    kept = slots >= 0
    latents.flatten(0, 2).index_copy_(0, slots[kept], latent[kept])
    return rotated if out is None else out.copy_(rotated)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x: [T, heads, rope_dim]. cos, sin: [T, 1, rope_dim / 2] float32."""
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def absorb_queries_reference(q: torch.Tensor, up: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """Return queries against latents, [T, heads, rank + rope_dim], of queries [T, heads, key_dim + rope_dim]."""
    key_dim = q.shape[2] - rope_dim
    latent = torch.bmm(q[..., :key_dim].transpose(0, 1), up[:, :key_dim]).transpose(0, 1)
    return torch.cat([latent, q[..., key_dim:]], dim=-1)


def values_of_reference(attended: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write into out, [T, heads, value_dim], the values of latents [T, heads, rank] that attention has returned."""
    weights = up[:, -out.shape[2] :].transpose(1, 2)
    return out.copy_(torch.bmm(attended.transpose(0, 1), weights).transpose(0, 1))


def gather_latents_reference(
    latents: torch.Tensor, tables: torch.Tensor, sequences: list[int], lengths: list[int]
) -> torch.Tensor:
    """Return the latents of some sequences one after another, [keys, rank + rope_dim].

    tables: [S, most blocks] int, the block tables of all sequences. lengths: [S], tokens in the cache.
    """
    size = latents.shape[1]
    parts = [latents[tables[at, : -(-lengths[at] // size)].long()].flatten(0, 2)[: lengths[at]] for at in sequences]
    return torch.cat(parts)


def latent_prefill_reference(
    q: torch.Tensor,
    expanded: torch.Tensor,
    latents: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    rope_dim: int,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention of a sequence's queries over expanded keys and values, computed in float64.

    q: [T, heads, key_dim + rope_dim]. expanded: [keys, heads, key_dim + value_dim]. latents: [keys, rank + rope_dim].
    positions: [T] int, the position of each query. sinks, window: as AttentionVariant has them. Returns [T, heads,
    value_dim].
    """
    key_dim = q.shape[2] - rope_dim
    shared = latents[:, None, latents.shape[1] - rope_dim :].expand(-1, q.shape[1], -1)
    keys = torch.cat([expanded[..., :key_dim], shared], dim=-1).double()
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    ages = positions[:, None] - torch.arange(len(keys), device=q.device)[None, :]
    hidden = ages < 0 if not window else (ages < 0) | (ages >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, expanded[..., key_dim:].double()).to(q.dtype)
