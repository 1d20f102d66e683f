"""Rotates queries and keys and writes keys and values into the paged cache.

Rotary embeddings after Su et al., "RoFormer" (2021); dimension i of a head pairs with i + head_dim / 2. Optionally each
query and key head is RMS-normed first (Qwen3). Models with other position encodings skip the rotation (BLOOM). A cache
in FP8 gets codes (kv_codes.py). Values may have another size than keys (MiMo-V2-Flash).
"""

import torch

from .kv_codes import kv_codes_reference
from .norm import add_rms_norm_reference


def rope_and_cache_reference(
    qkv: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
    inverses: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values to their slots of the cache.

    qkv: [T, (heads + kv_heads) * head_dim + kv_heads * value_dim]. rotary: cosines and sines, [positions, head_dim / 2]
    float32 each; None = no rotation. positions: [T] int. slots: [T] int64, the cache slot of each token's KV, as
    block * block_size + offset; nothing is written for a negative slot. keys, values: [blocks, block_size, kv_heads,
    head_dim or value_dim], written in place. norms: weights [head_dim] for queries and keys. inverses: of the scales of
    keys, then of values, [2, kv_heads] float32, if the cache holds codes. Returns the queries [T, heads, head_dim], in
    out when given. With 0 kv_heads, it only rotates queries.
    """
    kv_heads, dim = keys.shape[2:]
    qk, v = torch.split(qkv, [(num_heads + kv_heads) * dim, kv_heads * values.shape[3]], dim=1)
    qk, v = qk.unflatten(1, (-1, dim)), v.unflatten(1, (kv_heads, values.shape[3]))
    if norms is not None:
        qk = torch.cat(
            [
                add_rms_norm_reference(part, None, weight, eps)
                for part, weight in zip((qk[:, :num_heads], qk[:, num_heads:]), norms, strict=True)
            ],
            dim=1,
        )
    rotated = qk if rotary is None else _rotate(qk, *(table[positions].unsqueeze(1) for table in rotary))
    queries = rotated[:, :num_heads] if out is None else out.copy_(rotated[:, :num_heads])
    if not kv_heads:
        return queries
    if bool((slots < 0).any()):
        kept = slots >= 0
        slots, rotated_k, v = slots[kept], rotated[kept, num_heads:], v[kept]
    else:
        rotated_k = rotated[:, num_heads:]
    if inverses is not None:
        # As bytes, since torch does not copy every dtype of 8 bits by index.
        rotated_k, v = (
            kv_codes_reference(x, inverse).view(torch.uint8)
            for x, inverse in zip((rotated_k, v), inverses, strict=True)
        )
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    keys.flatten(0, 1).index_copy_(0, slots, rotated_k)
    values.flatten(0, 1).index_copy_(0, slots, v)
    return queries


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, dim]. cos, sin: [T, 1, dim / 2] float32. Returns a new tensor."""
    out = torch.empty_like(x, dtype=torch.float32)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out.to(x.dtype)
