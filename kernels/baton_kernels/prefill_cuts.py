"""Cuts the keys of prefill tiles into parts, so that a few tiles of queries over many keys fill a device.

Prefill attention runs one program per tile of queries and head. A short chunk of a long prompt has one tile, whose few
programs would leave most of a device idle while the step waits for them. As in Flash-Decoding (Dao et al., 2023), such
tiles are computed in parts, and a second kernel merges the softmaxes of the parts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.paged_attention import oldest_key

PROGRAMS = 264  # programs of the prefill kernel that fill a device: two on each multiprocessor of an H200
# The least keys of a part: writing and reading its float32 result must not cost more than reading its keys.
_LEAST_KEYS = 256
_JOINED_ROWS = 16  # queries of a program that merges parts


@dataclass(frozen=True, slots=True)
class TileCuts:
    """Which tiles of a step are parts.

    tiles: [3, tiles] int32: each tile's index among the parts of its queries, the number of these parts, and the slot
    of its result among those of all parts, which is undefined for a tile that is not cut. joins: [tiles that are cut]
    int32, the index of the first part. slots: the number of parts of all tiles that are cut.
    """

    tiles: torch.Tensor
    joins: torch.Tensor
    slots: int


@dataclass(frozen=True, slots=True)
class CutPlan:
    """The tiles of a step, some of which are cut. columns: sequences and rows of the tiles, then TileCuts.tiles row by
    row and TileCuts.joins. slots: as in TileCuts."""

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
    """Cut the tiles of a step that have more than one program's share of the keys. Return None if no tile would have
    `least` parts.

    tiles, starts: as `prefill_tiles` returns and takes them. lengths: of the sequences, in tokens. window,
    chunked: as in AttentionVariant. capacity: the number of tiles that fills a device.
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
    """Merge the results of parts into those rows of out, [T, heads, dim of values], whose tiles are cut.

    partial: [slots, queries of a tile, heads, dim of values] float32. logsums: [slots, queries of a tile, heads]
    float32, the logarithm to base 2 of each softmax's sum, -inf for queries that see no key of the part.
    """
    block_queries, heads, dim = partial.shape[1:]
    _join_kernel[(len(cuts.joins), block_queries // _JOINED_ROWS, heads)](
        partial, logsums, cuts.tiles, cuts.joins, *tiles, starts, out, cuts.tiles.shape[1],
        HEADS=heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_QUERIES=block_queries, ROWS=_JOINED_ROWS,
        num_warps=2, **overlap_options(out.device),
    )  # fmt: skip
