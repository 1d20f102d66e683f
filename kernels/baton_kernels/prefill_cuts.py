"""Cuts the keys of prefill tiles into parts, so that a few tiles of queries over many keys fill a device.

Prefill attention runs one program per tile of queries and head. A short chunk of a long prompt has one tile, whose few
programs would leave most of a device idle while the step waits for them. As in Flash-Decoding (Dao et al., 2023), such
tiles are computed in parts, and a second kernel joins the softmaxes of the parts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.paged_attention import oldest_key

PROGRAMS = 264  # of the prefill kernel, which fill a device: two on each multiprocessor of an H200
# Keys of a part, at least: its result is written and read once more in float32, which must not cost more than its keys.
_LEAST_KEYS = 256
_JOINED_ROWS = 16  # queries of a program that joins


@dataclass(frozen=True, slots=True)
class TileCuts:
    """Which tiles of a step are parts.

    tiles: [3, tiles] int32, each tile's index among the parts of its queries, the number of these parts, and where its
    result goes among those of all parts; the last means nothing for a tile that is alone. joins: [tiles that are cut]
    int32, the tile that is the first part. slots: the number of parts of the tiles that are cut.
    """

    tiles: torch.Tensor
    joins: torch.Tensor
    slots: int


@dataclass(frozen=True, slots=True)
class CutPlan:
    """The tiles of a step, of which some are parts. columns: sequences and rows of the tiles, then TileCuts.tiles row
    by row and TileCuts.joins. slots: as in TileCuts."""

    columns: tuple[list[int], list[int], list[int], list[int]]
    slots: int


def cut_tiles(
    tiles: tuple[Sequence[int], Sequence[int]],
    starts: list[int],
    lengths: list[int],
    block_queries: int,
    window: int,
    capacity: int,
    least: int = 2,
    chunked: bool = False,
) -> CutPlan | None:
    """Return the step's tiles with those cut that have more than a program's share of the keys; None = no tile would
    have as many as `least` parts.

    tiles, starts: as `prefill_tiles` returns and takes them. lengths: of the sequences, in tokens. window,
    chunked: as in AttentionVariant. capacity: the tiles that fill a device.
    """
    seen = []
    for sequence, row in zip(*tiles, strict=True):
        first = lengths[sequence] - starts[sequence + 1] + row
        oldest = max(oldest_key(first, window, chunked), 0) if window else 0
        seen.append(min(first + block_queries, lengths[sequence]) - oldest)
    total = sum(seen)
    # Rounded down: with more programs than fit at once, the rest would run after all others.
    counts = [max(min(keys * capacity // total, keys // _LEAST_KEYS), 1) for keys in seen]
    if max(counts, default=1) < least:
        return None
    sequences, rows = (
        [each for each, count in zip(column, counts, strict=True) for _ in range(count)] for column in tiles
    )
    part = [index for count in counts for index in range(count)]
    parts = [count for count in counts for _ in range(count)]
    *slots, used = itertools.accumulate((count > 1 for count in parts), initial=0)
    joins = [tile for tile, count in enumerate(parts) if count > 1 and part[tile] == 0]
    return CutPlan((sequences, rows, part + parts + slots, joins), used)


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["tiles"])
def _join_kernel(
    partial, logsums, cuts, joins, tile_sequences, tile_rows, starts, out, tiles,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_QUERIES: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    tile = tl.load(joins + tl.program_id(0))
    head = tl.program_id(2)
    parts = tl.load(cuts + tiles + tile)
    slot = tl.load(cuts + 2 * tiles + tile)
    in_tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.load(tile_rows + tile) + in_tile
    real = row < tl.load(starts + tl.load(tile_sequences + tile) + 1)
    column = tl.arange(0, BLOCK_DIM)
    inside = real[:, None] & (column < DIM)[None, :]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for part in range(0, parts):
        at = ((slot + part).to(tl.int64) * BLOCK_QUERIES + in_tile) * HEADS + head
        logsum = tl.load(logsums + at, mask=real, other=float("-inf"))
        result = tl.load(partial + at[:, None] * DIM + column[None, :], mask=inside, other=0.0)
        new_peak = tl.maximum(peak, logsum)
        # A window may hide all keys of the first parts from a query, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink, weight = tl.exp2(peak - base), tl.exp2(logsum - base)
        acc = acc * shrink[:, None] + result * weight[:, None]
        total = total * shrink + weight
        peak = new_peak
    total = tl.where(total == 0.0, 1.0, total)
    to = (row.to(tl.int64)[:, None] * HEADS + head) * DIM + column[None, :]
    tl.store(out + to, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def join_parts(
    partial: torch.Tensor,
    logsums: torch.Tensor,
    cuts: TileCuts,
    tiles: tuple[torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Join the results of parts into the rows of out, [T, heads, head_dim], that belong to tiles which are cut.

    partial: [slots, queries of a tile, heads, head_dim] float32. logsums: [slots, queries of a tile, heads] float32,
    the logarithm to base 2 of each softmax's sum, -inf for queries that see no key of the part.
    """
    block_queries, heads, dim = partial.shape[1:]
    _join_kernel[(len(cuts.joins), block_queries // _JOINED_ROWS, heads)](
        partial, logsums, cuts.tiles, cuts.joins, *tiles, starts, out, cuts.tiles.shape[1],
        HEADS=heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_QUERIES=block_queries, ROWS=_JOINED_ROWS,
        num_warps=2, **overlap_options(out.device),
    )  # fmt: skip
