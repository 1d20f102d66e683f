"""Compressed attention (DeepSeek-AI, "DeepSeek-V4", 2026) in plain torch: entries that sum up windows of tokens, and
the rotation of the ends of heads.

The tokens of a sequence form windows of `rate` tokens. When a window ends, its entry is written to the cache: in each
channel a mean of vectors of tokens, weighted by a softmax of their gates over the window. A softmax can be computed
token by token (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): a running one consists of
the largest gate, the sum of the weights and the sum of the weighted vectors. So a compressor is a recurrence with a
small state.

With overlapping windows each token has two vectors: the first counts for the entry of the next window, the second for
that of its own.
"""

import math
from typing import NamedTuple

import torch

from .latent import rotate
from .state_blocks import visits

# Entries of layers with the same windows lie side by side in the rows of a window's last tokens. Block sizes are
# multiples of this number (STATE_PLACES in kv_layout.py), so all these rows are in one block.
MOST_ROWS = 8
_PARTS = 3  # of a running softmax


def window_rows(rate: int) -> int:
    """Return how many rows at the end of a window of `rate` tokens are always in one block."""
    return math.gcd(rate, MOST_ROWS)


class Compression(NamedTuple):
    """dim: elements of an entry. rate: tokens of a window. overlaps: windows overlap. first: how many float32 numbers
    of a block with states come before the state. row, column: where an entry begins in the rows of a window's last
    `window_rows(rate)` tokens."""

    dim: int
    rate: int
    overlaps: bool
    first: int
    row: int
    column: int

    @property
    def series(self) -> int:
        """The vectors of a token, and the running softmaxes of a state."""
        return 2 if self.overlaps else 1

    @property
    def numbers(self) -> int:
        """The float32 numbers of a state."""
        return self.series * _PARTS * self.dim


def compress_reference(
    projected: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    entry_slots: torch.Tensor,
    states: torch.Tensor,
    entries: torch.Tensor,
    shape: Compression,
) -> None:
    """Write the entries of the windows that end in a step, and the states after its tokens.

    projected: [T, 2 * series * dim], the vectors of each token and then their gates. bias: [rate, series * dim]
    float32, added to the gates by the token's place in its window. norm, eps: of the RMS norm of entries, [dim]
    float32. rotary: as in turn_ends_reference; an entry is rotated by the position of its window's first token.
    positions: [T] int64. slots: of the states, as recurrence_reference has them. entry_slots: [T] int64, the tokens'
    slots among the entries; negative = nothing is written. states, entries: the planes of both layers, [blocks,
    block_size, 1, elements], written in place. The sums are in float32.
    """
    size, width = states.shape[1], entries.shape[3]
    numbers = states.flatten(1).view(torch.float32)[:, shape.first : shape.first + shape.numbers]
    flat, back = entries.view(-1), window_rows(shape.rate) - 1 - shape.row
    vectors, gates = (each.unflatten(1, (shape.series, -1)) for each in projected.float().chunk(2, dim=1))
    where, kept = positions.tolist(), entry_slots.tolist()
    gates = gates + bias.view(shape.rate, shape.series, -1)[positions % shape.rate]
    fresh = torch.zeros(_PARTS, shape.series, shape.dim, device=projected.device)
    fresh[0] = float("-inf")
    state, first = fresh, 0
    for token, (slot, before, begins, keeps) in enumerate(visits(slots, size)):
        ends = (where[token] + 1) % shape.rate == 0
        if begins:
            state, first = fresh if before < 0 else numbers[before // size].view(fresh.shape).clone(), token
        if where[token] % shape.rate == 0 and not shape.overlaps:
            state = fresh
        if not (ends or keeps):
            continue
        own, first = slice(first, token + 1), token + 1
        state = _added(state, vectors[own], gates[own])
        if ends:
            if kept[token] >= 0:
                mean = state[2, -1] / state[1, -1]
                normed = mean * torch.rsqrt(mean.square().mean() + eps) * norm
                begin = positions[token : token + 1] + 1 - shape.rate
                entry = turn_ends_reference(normed.view(1, 1, -1), rotary, begin).view(-1)
                at = (kept[token] - back) * width + shape.column
                flat[at : at + shape.dim] = entry.to(flat.dtype)
            state = torch.cat([fresh[:, :1], state[:, :1]], dim=1) if shape.overlaps else fresh
        if keeps:
            numbers[slot // size] = state.flatten()


def _added(state: torch.Tensor, vectors: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return running softmaxes with some more tokens. state: [3, series, dim]. vectors, gates: [T, series, dim]."""
    peak = torch.maximum(state[0], gates.amax(dim=0))
    # Before a gate above -inf, both differences would be NaN.
    shrink = torch.where(state[0] == float("-inf"), 0.0, (state[0] - peak).exp())
    weights = (gates - peak).exp()
    total, acc = weights.sum(dim=0), (weights * vectors).sum(dim=0)
    return torch.stack([peak, state[1] * shrink + total, state[2] * shrink + acc])


def turn_ends_reference(
    x: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    *,
    back: bool = False,
    eps: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return heads whose ends are rotated by the position of their token, [T, heads, dim], in out when given.

    x: [T, heads, dim]. rotary: cosines and sines, [positions, pairs] float32 each; the last 2 * pairs elements of a
    head are rotated, and the two elements of a pair lie side by side, also in the result. positions: [T] int64. back:
    the heads are rotated the other way. eps: each head is divided by its root mean square first; None = it is not.
    """
    wide = x.float()
    if eps is not None:
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    cos, sin = (table[positions].unsqueeze(1) for table in rotary)
    kept, end = wide.split([x.shape[2] - 2 * cos.shape[2], 2 * cos.shape[2]], dim=2)
    turned = rotate(end, cos, -sin if back else sin, interleaved=True)
    halves = torch.stack(turned.chunk(2, dim=2), dim=3).flatten(2)
    result = torch.cat([kept, halves], dim=2).to(x.dtype)
    return result if out is None else out.copy_(result)


def keep_key_reference(
    kv: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
) -> None:
    """Write the RMS norm of each token's key, rotated as by turn_ends_reference, to its slot of the cache.

    kv: [T, dim]. norm: [dim] float32. slots: [T] int64; nothing is written for a negative slot. keys: [blocks,
    block_size, 1, dim], written in place.
    """
    wide = kv.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + eps) * norm
    kept = slots >= 0
    turned = turn_ends_reference(normed[:, None], rotary, positions)
    keys.flatten(0, 2).index_copy_(0, slots[kept], turned[kept, 0].to(keys.dtype))
