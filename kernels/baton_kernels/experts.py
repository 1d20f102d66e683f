"""Layers of experts: the choice of each token's experts, and the products of these experts alone.

A pair is a token and one of its experts. In small batches a program multiplies the row of one pair with weights of its
expert, so that only experts that are used are read. In larger batches pairs are grouped by expert into blocks of rows,
so that a tile of weights is read once for a whole block. Each pair has a result of its own; a last kernel adds up those
of a token, in the order of its experts, so that the sum does not depend on which program is done first.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .activation import silu_mul
from .overlap import let_next_start, overlap_options, wait_for_inputs

# Pairs that a program of the grouping kernels reads at a time.
_PAIRS_AT_ONCE = 1024


class ExpertsConfig(NamedTuple):
    """Tile sizes of a product with experts' weights. block_rows 1: no pairs are grouped."""

    block_rows: int
    block_outputs: int
    block_inner: int
    num_warps: int
    num_stages: int = 3


# A token's result does not depend on the tokens around it when all batches have the same tiles.
FIXED = ExpertsConfig(16, 64, 64, 4)


@triton.jit
def _route_kernel(
    logits, weights, experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr, NORMALIZE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    values = tl.load(logits + token * EXPERTS + lane, mask=lane < EXPERTS, other=float("-inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, axis=0))
    left = values / tl.sum(values, axis=0)
    choice = tl.arange(0, BLOCK_COUNT)
    chosen = tl.zeros([BLOCK_COUNT], tl.int32)
    weight = tl.zeros([BLOCK_COUNT], tl.float32)
    for number in tl.static_range(COUNT):
        best = tl.max(left, axis=0)
        # Where a logit is NaN no lane equals the maximum. Any expert will do then, if only there is such an expert.
        expert = tl.minimum(tl.min(tl.where(left == best, lane, BLOCK), axis=0), EXPERTS - 1)
        chosen = tl.where(choice == number, expert, chosen)
        weight = tl.where(choice == number, best, weight)
        left = tl.where(lane == expert, -1.0, left)
    if NORMALIZE:
        weight = weight / tl.sum(weight, axis=0)
    tl.store(experts + token * COUNT + choice, chosen, mask=choice < COUNT)
    tl.store(weights + token * COUNT + choice, weight, mask=choice < COUNT)


def route(logits: torch.Tensor, count: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute route_reference. Of experts with equal logits, the one with the smallest number comes first."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, count, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, count, dtype=torch.int32, device=logits.device)
    block = triton.next_power_of_2(experts)
    _route_kernel[(tokens,)](
        logits, weights, chosen, EXPERTS=experts, BLOCK=block, COUNT=count,
        BLOCK_COUNT=triton.next_power_of_2(count), NORMALIZE=normalize,
        num_warps=1 if block <= 256 else 4, **overlap_options(logits.device),
    )  # fmt: skip
    return weights, chosen


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(experts, counts, pairs, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
    let_next_start(OVERLAP)
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    wait_for_inputs(OVERLAP)
    count = 0
    for first in range(0, pairs, CHUNK):
        chosen = tl.load(experts + first + lane, mask=first + lane < pairs, other=-1)
        count += tl.sum((chosen == expert).to(tl.int32), axis=0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _group_kernel(
    experts, counts, order, block_experts, pairs, blocks, EXPERTS: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    each = tl.arange(0, LANES)
    wait_for_inputs(OVERLAP)
    needed = tl.cdiv(tl.load(counts + each, mask=each < EXPERTS, other=0), ROWS)
    first_block = tl.sum(tl.where(each < expert, needed, 0), axis=0)
    end_block = first_block + tl.sum(tl.where(each == expert, needed, 0), axis=0)
    to = first_block * ROWS
    for first in range(0, pairs, CHUNK):
        chosen = tl.load(experts + first + lane, mask=first + lane < pairs, other=-1)
        mine = chosen == expert
        before = tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(order + to + before, first + lane, mask=mine)
        to += tl.sum(mine.to(tl.int32), axis=0)
    # The rest of the last block holds no pair.
    row = tl.arange(0, ROWS)
    tl.store(order + to + row, -1, mask=to + row < end_block * ROWS)
    for block in range(first_block, end_block):
        tl.store(block_experts + block, expert)
    if expert == EXPERTS - 1:
        for block in range(end_block, blocks):
            tl.store(block_experts + block, -1)


class _Groups(NamedTuple):
    """Pairs by expert. order: [blocks * block_rows] int32, the pair of each row, -1 = none. block_experts: [blocks]
    int32, -1 for blocks that are not used."""

    order: torch.Tensor
    block_experts: torch.Tensor


def _group(experts: torch.Tensor, num_experts: int, block_rows: int) -> _Groups:
    pairs = experts.numel()
    blocks = pairs // block_rows + min(num_experts, pairs)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    order = torch.empty(blocks * block_rows, dtype=torch.int32, device=experts.device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=experts.device)
    options = overlap_options(experts.device)
    chunk = min(max(triton.next_power_of_2(pairs), 32), _PAIRS_AT_ONCE)
    _count_kernel[(num_experts,)](experts, counts, pairs, CHUNK=chunk, num_warps=1, **options)
    _group_kernel[(num_experts,)](
        experts, counts, order, block_experts, pairs, blocks, EXPERTS=num_experts,
        LANES=triton.next_power_of_2(num_experts), CHUNK=chunk, ROWS=block_rows, num_warps=1, **options,
    )  # fmt: skip
    return _Groups(order, block_experts)


@triton.jit
def _rows_kernel(
    x, weight, experts, out, outputs, inner_size, PAIRS_PER_ROW: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INNER: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    pair = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INNER)
    real = (output < outputs)[:, None]
    wait_for_inputs(OVERLAP)
    expert = tl.load(experts + pair).to(tl.int64)
    halves: tl.constexpr = 2 if GATED else 1
    at = weight + (expert * halves * outputs + output[:, None]) * inner_size + inner[None, :]
    up_at = at + outputs.to(tl.int64) * inner_size
    x_at = x + pair // PAIRS_PER_ROW * inner_size + inner
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_INNER], tl.float32)
    acc_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_INNER], tl.float32)
    for first in range(0, inner_size, BLOCK_INNER):
        known = first + inner < inner_size
        values = tl.load(x_at + first, mask=known, other=0.0).to(tl.float32)[None, :]
        acc += tl.load(at + first, mask=real & known[None, :], other=0.0).to(tl.float32) * values
        if GATED:
            acc_up += tl.load(up_at + first, mask=real & known[None, :], other=0.0).to(tl.float32) * values
    result = tl.sum(acc, axis=1)
    if GATED:
        result = silu_mul(result, tl.sum(acc_up, axis=1), out.dtype.element_ty)
    tl.store(out + pair * outputs + output, result.to(out.dtype.element_ty), mask=output < outputs)


@triton.jit
def _blocks_kernel(
    x, weight, order, block_experts, out, outputs, inner_size, PAIRS_PER_ROW: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr, GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    # Programs of one block are neighbours in one dimension and share its rows; those of one expert share its weights.
    block = tl.program_id(0)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INNER)
    wait_for_inputs(OVERLAP)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    here = pair >= 0
    # Outputs beyond the last one read its weights, so that loads need no mask. Their results are not stored.
    w_row = tl.minimum(output, outputs - 1)
    halves: tl.constexpr = 2 if GATED else 1
    w_at = weight + (expert * halves * outputs + w_row[:, None]) * inner_size + inner[None, :]
    up_at = w_at + outputs.to(tl.int64) * inner_size
    x_at = x + (pair // PAIRS_PER_ROW)[None, :] * inner_size + inner[:, None]
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    acc_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for first in range(0, inner_size, BLOCK_INNER):
        known = first + inner < inner_size
        values = tl.load(x_at + first, mask=known[:, None] & here[None, :], other=0.0)
        acc = tl.dot(tl.load(w_at + first, mask=known[None, :], other=0.0), values, acc, input_precision="ieee")
        if GATED:
            w_up = tl.load(up_at + first, mask=known[None, :], other=0.0)
            acc_up = tl.dot(w_up, values, acc_up, input_precision="ieee")
    if GATED:
        acc = silu_mul(acc, acc_up, out.dtype.element_ty)
    at = out + pair[None, :] * outputs + output[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & here[None, :])


@triton.jit
def _sum_kernel(
    results, weights, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, OVERLAP: tl.constexpr
):
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(COUNT):
        pair = token * COUNT + choice
        result = tl.load(results + pair * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
        total += result * tl.load(weights + pair)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=column < SIZE)


def _config(pairs: int, num_experts: int) -> ExpertsConfig:
    """Return the tile sizes for a number of pairs: as many rows as an expert has on average, within limits."""
    if pairs <= max(num_experts // 4, 8):
        return ExpertsConfig(1, 4, 512, 4)
    rows = min(max(triton.next_power_of_2(triton.cdiv(pairs, num_experts)), 16), 128)
    return ExpertsConfig(rows, 128 if rows > 16 else 64, 64, 8 if rows == 128 else 4)


def run_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    config: ExpertsConfig | None = None,
) -> torch.Tensor:
    """Compute experts_reference. All tensors are contiguous. config: None = by the number of tokens and experts."""
    tokens, count = experts.shape
    num_experts, hidden, size = down.shape
    pairs = tokens * count
    config = config or _config(pairs, num_experts)
    inner, results, out = x.new_empty(pairs, size), x.new_empty(pairs, hidden), torch.empty_like(x)
    options = overlap_options(x.device)
    # The rows of x belong to tokens, those of `inner` to pairs.
    products = (x, gate_up, inner, size, hidden, count, True), (inner, down, results, hidden, size, 1, False)
    if config.block_rows == 1:
        for values, weight, to, outputs, inner_size, pairs_per_row, gated in products:
            _rows_kernel[(triton.cdiv(outputs, config.block_outputs), pairs)](
                values, weight, experts, to, outputs, inner_size, PAIRS_PER_ROW=pairs_per_row,
                BLOCK_OUTPUTS=config.block_outputs, BLOCK_INNER=config.block_inner, GATED=gated,
                num_warps=config.num_warps, **options,
            )  # fmt: skip
    else:
        order, block_experts = _group(experts, num_experts, config.block_rows)
        for values, weight, to, outputs, inner_size, pairs_per_row, gated in products:
            _blocks_kernel[(len(block_experts), triton.cdiv(outputs, config.block_outputs))](
                values, weight, order, block_experts, to, outputs, inner_size, PAIRS_PER_ROW=pairs_per_row,
                BLOCK_ROWS=config.block_rows, BLOCK_OUTPUTS=config.block_outputs, BLOCK_INNER=config.block_inner,
                GATED=gated, num_warps=config.num_warps, num_stages=config.num_stages, **options,
            )  # fmt: skip
    block = min(triton.next_power_of_2(hidden), 1024)
    _sum_kernel[(tokens, triton.cdiv(hidden, block))](
        results, weights, out, SIZE=hidden, BLOCK=block, COUNT=count, num_warps=4, **options
    )
    return out


def run_experts_fixed(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Compute experts_reference such that the bits of a token's result do not depend on the other tokens."""
    return run_experts(x, gate_up, down, weights, experts, FIXED)
