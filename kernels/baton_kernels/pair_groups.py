"""Groups pairs by expert into blocks of rows, so that a product reads a tile of an expert's weights once per block.

A pair is a token and one of its experts, with the number token * experts per token + choice. The pairs of an expert
keep their order, so that groups are the same in each run. Pairs whose expert is NOT_OWN are in no group.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .size_class import size_class

# Pairs that a program reads at a time, and the most pairs that one program reads: reading all pairs of a long prompt
# would take longer than the products.
_PAIRS_AT_ONCE = 1024
_PAIRS_OF_RANGE = 8192


class PairGroups(NamedTuple):
    """order: [blocks * block_rows] int32, the pair of each row, -1 = none. block_experts: [blocks] int32, the expert of
    each block, -1 for blocks that are not used."""

    order: torch.Tensor
    block_experts: torch.Tensor


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    experts, counts, pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, RANGE: tl.constexpr, OVERLAP: tl.constexpr
):
    let_next_start(OVERLAP)
    expert, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    end = tl.minimum((part + 1) * RANGE, pairs)
    wait_for_inputs(OVERLAP)
    count = 0
    for first in range(part * RANGE, end, CHUNK):
        chosen = tl.load(experts + first + lane, mask=first + lane < end, other=-1)
        count += tl.sum((chosen == expert).to(tl.int32), axis=0)
    tl.store(counts + part * EXPERTS + expert, count)


# One compiled kernel serves all numbers of pairs within a power of two.
@triton.jit(do_not_specialize=["pairs", "blocks", "parts"])
def _group_kernel(
    experts, counts, order, block_experts, pairs, blocks, parts, EXPERTS: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, RANGE: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    expert, part = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    each = tl.arange(0, LANES)
    begin, end = part * RANGE, tl.minimum((part + 1) * RANGE, pairs)
    wait_for_inputs(OVERLAP)
    total = tl.zeros([LANES], tl.int32)
    before = 0
    if COUNTED:
        for other in range(0, parts):
            count = tl.load(counts + other * EXPERTS + each, mask=each < EXPERTS, other=0)
            total += count
            before += tl.where(other < part, tl.sum(tl.where(each == expert, count, 0), axis=0), 0)
    else:
        for first in range(0, end, CHUNK):
            chosen = tl.load(experts + first + lane, mask=first + lane < end, other=-1)
            total += tl.histogram(tl.maximum(chosen, 0), LANES, mask=chosen >= 0)
    needed = tl.cdiv(total, ROWS)
    first_block = tl.sum(tl.where(each < expert, needed, 0), axis=0)
    end_block = first_block + tl.sum(tl.where(each == expert, needed, 0), axis=0)
    to = first_block * ROWS + before
    for first in range(begin, end, CHUNK):
        chosen = tl.load(experts + first + lane, mask=first + lane < end, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order + to + tl.cumsum(mine, axis=0) - 1, first + lane, mask=mine > 0)
        to += tl.sum(mine, axis=0)
    if part == parts - 1:
        # The rest of the last block holds no pair.
        row = tl.arange(0, ROWS)
        tl.store(order + to + row, -1, mask=to + row < end_block * ROWS)
    if part == 0:
        for first in range(first_block, end_block, LANES):
            tl.store(block_experts + first + each, expert, mask=first + each < end_block)
        if expert == EXPERTS - 1:
            for first in range(end_block, blocks, LANES):
                tl.store(block_experts + first + each, -1, mask=first + each < blocks)


def group_pairs(experts: torch.Tensor, num_experts: int, block_rows: int) -> PairGroups:
    """Return the pairs of a step by expert. experts: [T, experts of a token] int32, contiguous, from NOT_OWN on."""
    pairs = experts.numel()
    blocks = pairs // block_rows + min(num_experts, pairs)
    order = torch.empty(blocks * block_rows, dtype=torch.int32, device=experts.device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=experts.device)
    options = overlap_options(experts.device)
    most = size_class(len(experts)) * experts.shape[1]
    chunk = min(max(triton.next_power_of_2(most), 32), _PAIRS_AT_ONCE)
    parts = triton.cdiv(pairs, _PAIRS_OF_RANGE)
    # If there are few pairs, each program counts all of them, which takes less time than another kernel.
    counted = most > _PAIRS_AT_ONCE
    counts = experts
    sizes = {"EXPERTS": num_experts, "CHUNK": chunk, "RANGE": _PAIRS_OF_RANGE}
    warps = 1 if chunk <= 256 else 4
    if counted:
        counts = torch.empty(parts, num_experts, dtype=torch.int32, device=experts.device)
        _count_kernel[(num_experts, parts)](experts, counts, pairs, num_warps=warps, **sizes, **options)
    _group_kernel[(num_experts, parts)](
        experts, counts, order, block_experts, pairs, blocks, parts, LANES=triton.next_power_of_2(num_experts),
        ROWS=block_rows, COUNTED=counted, num_warps=warps, **sizes, **options,
    )  # fmt: skip
    return PairGroups(order, block_experts)
