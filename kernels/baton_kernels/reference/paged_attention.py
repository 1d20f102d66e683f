"""Attention over the paged cache in plain torch, the reference for both attention kernels."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionVariant:
    """How attention differs from softmax(q k * scale) v.

    window: tokens that a query sees, its own included; 0 = all. softcap: scores become softcap * tanh(score / softcap)
    (Gemma 2); 0 = off. alibi: slopes [heads] float32, added to the scores as -slope * distance (Press et al., 2022).
    sinks: [heads] float32, one more score of each query, without a key or a value, in the softmax (OpenAI, gpt-oss).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


def paged_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    variant: AttentionVariant,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's newest tokens over its blocks.

    q: [T, heads, head_dim]. keys, values: [blocks, block_size, kv_heads, head_dim]; the dim of values may be another.
    tables: [S, most blocks] int, the blocks of each sequence, in any order. lengths: [S] int, tokens in the cache.
    starts: [S + 1] int, the index of each sequence's first query; its queries are the last of its tokens.
    scales: of keys, then of values, [2, kv_heads] float32, if the cache holds codes (kv_codes.py). Returns
    [T, heads, dim of values] in q's dtype, computed in float64.
    """
    out = q.new_empty(*q.shape[:2], values.shape[3])
    group = q.shape[1] // keys.shape[2]
    for index, length in enumerate(lengths.tolist()):
        first, end = int(starts[index]), int(starts[index + 1])
        if first == end:
            continue
        blocks = tables[index, : -(-length // keys.shape[1])].long()
        k, v = (x[blocks].flatten(0, 1)[:length].double() for x in (keys, values))
        if scales is not None:
            k, v = (x * scale.double()[:, None] for x, scale in zip((k, v), scales, strict=True))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:end].double(), k) * variant.scale
        if variant.softcap:
            scores = variant.softcap * torch.tanh(scores / variant.softcap)
        ages = torch.arange(length - (end - first), length).unsqueeze(1) - torch.arange(length).unsqueeze(0)
        ages = ages.to(q.device)
        if variant.alibi is not None:
            scores = scores - variant.alibi.double()[:, None, None] * ages
        hidden = ages < 0
        if variant.window:
            hidden |= ages >= variant.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if variant.sinks is not None:
            sinks = variant.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
