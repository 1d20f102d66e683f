"""Attention over the paged cache in plain torch, the reference for both attention kernels."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

# An integer, or an array or tensor of them.
Positions = TypeVar("Positions", int, Any)


@dataclass(frozen=True)
class AttentionVariant:
    """How attention differs from softmax(q k * scale) v.

    window: tokens that a query sees, its own included; 0 = all. softcap: scores become softcap * tanh(score / softcap)
    (Gemma 2); 0 = off. alibi: slopes [heads] float32, added to the scores as -slope * distance (Press et al., 2022).
    rounded_alibi: they are added as scale * rounded_alibi_reference instead (Falcon).
    sinks: [heads] float32, one more score of each query, without a key or a value, in the softmax (OpenAI, gpt-oss).
    chunked: tokens form chunks of `window` tokens, and a query sees those of its own chunk up to its own (Llama 4).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    chunked: bool = False
    rounded_alibi: bool = False

    @property
    def alibi_form(self) -> int:
        """0 = without ALiBi, 1 = by distance, 2 = rounded."""
        return 0 if self.alibi is None else 1 + self.rounded_alibi


def oldest_key(position: Positions, window: int, chunked: bool) -> Positions:
    """Return the position of the first key that a query sees, which may be negative. window, chunked: as in
    AttentionVariant."""
    return position // window * window if chunked else position - window + 1


def rounded_alibi_reference(slopes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return slope * position in float32, where the position of the key and the product are rounded to bfloat16."""
    return (slopes * positions.bfloat16().float()).bfloat16().float()


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
    tables, lengths, starts = (x.to(q.device).long() for x in (tables, lengths, starts))
    counts = starts[1:] - starts[:-1]
    for count in counts.unique().tolist():
        if count == 0:
            continue
        # Sequences with equally many queries are computed at once, padded to the longest of them.
        alike = (counts == count).nonzero().squeeze(1)
        rows = starts[:-1][alike, None] + torch.arange(count, device=q.device)
        known = lengths[alike, None]
        positions = torch.arange(int(known.max()), device=q.device)
        padding = positions >= known
        blocks, slots = positions // keys.shape[1], positions % keys.shape[1]
        found = tables[alike][:, blocks].masked_fill(padding, 0)
        k, v = (_read(x, found, slots, padding) for x in (keys, values))
        if scales is not None:
            k, v = (x * scale.double()[:, None] for x, scale in zip((k, v), scales, strict=True))
        # Keys behind a sequence's end are newer than all of its queries.
        ages = (known - count)[:, :, None] + torch.arange(count, device=q.device)[:, None] - positions
        hidden = ages < 0
        if variant.window:
            hidden |= positions < oldest_key(ages + positions, variant.window, variant.chunked)
        result = _attention(q[rows].double(), k, v, ages[:, None], hidden[:, None], positions, variant)
        out[rows] = result.to(q.dtype)
    return out


def _read(cache: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Return [S, keys, kv_heads, dim] float64. blocks: [S, keys]. slots: [keys]. padding: [S, keys], zero instead."""
    return cache[blocks, slots].double().masked_fill(padding[:, :, None, None], 0)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ages: torch.Tensor,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    variant: AttentionVariant,
) -> torch.Tensor:
    """Return [S, queries, heads, dim of values]. ages: [S, 1, queries, keys], by how much a query is newer than a key.
    hidden: whether it does not see the key. positions: [keys]."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("sqhd,skhd->shqk", q, k) * variant.scale
    if variant.softcap:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if variant.alibi is not None and variant.rounded_alibi:
        rounded = rounded_alibi_reference(variant.alibi[:, None, None], positions)
        scores = scores + variant.scale * rounded.double()
    elif variant.alibi is not None:
        scores = scores - variant.alibi.double()[:, None, None] * ages
    scores = scores.masked_fill(hidden, float("-inf"))
    if variant.sinks is not None:
        sinks = variant.sinks.double()[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("shqk,skhd->sqhd", weights, v)
