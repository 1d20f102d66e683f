"""MoE layers: the products of the experts that a router has chosen for each token.

A pair is a token and one of its experts. In small batches a program multiplies one row at a time with weights of its
expert, so that only the weights of chosen experts are read. The first kernel computes the row of a pair, the second the
sum over all pairs of a token. In larger batches pairs are grouped by expert into blocks of rows (pair_groups.py). Then
each pair has its own result, and a last kernel adds up the results of a token in the order of its experts, so that the
sum does not depend on which program finishes first. A pair whose expert is NOT_OWN has no weights on this rank: no
kernel computes it or reads its result, which is not initialized.
"""

import torch
import triton
import triton.language as tl

from .activation import gate_options, unit_of_expert
from .hopper_experts import candidates as hopper_candidates
from .hopper_experts import fits_hopper_experts, hopper_experts
from .kernel_configs import ExpertLayer, ExpertsConfig, ProductConfig
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .pair_groups import group_pairs
from .reference.experts import ExpertWeights
from .scaled_linear import load_tile
from .size_class import size_class
from .tile_order import tile_of
from .tuning import experts_config
from .unmeasured import experts_candidates
from .unmeasured_products import TOKENS, random_choice, random_rows, watch

# When all batches use the same tiles, a token's result does not depend on the other tokens of the batch.
FIXED = ExpertsConfig(16, ProductConfig(64, 64, 4, 3), ProductConfig(64, 64, 4, 3))


@triton.jit
def _gate_up_row_kernel(
    x, weight, bias, experts, out, outputs, INNER: tl.constexpr, COUNT: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INNER: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    pair = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INNER)
    real = output < outputs
    x_at = x + pair // COUNT * INNER + inner
    wait_for_inputs(OVERLAP)
    expert = tl.load(experts + pair).to(tl.int64)
    if expert < 0:
        return
    halves: tl.constexpr = 2 if GATED else 1
    w_row = expert * halves * outputs + output
    at = weight + w_row[:, None] * INNER + inner[None, :]
    up_at = at + tl.cast(outputs, tl.int64) * INNER
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_INNER], tl.float32)
    acc_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_INNER], tl.float32)
    for first in tl.range(0, INNER, BLOCK_INNER, loop_unroll_factor=4):
        known = first + inner < INNER
        there = real[:, None] & known[None, :]
        w = tl.load(at + first, mask=there, other=0.0)
        # Both loads come before the first sum, so that they wait for memory together.
        if GATED:
            w_up = tl.load(up_at + first, mask=there, other=0.0)
        values = tl.load(x_at + first, mask=known, other=0.0).to(tl.float32)[None, :]
        acc += w.to(tl.float32) * values
        if GATED:
            acc_up += w_up.to(tl.float32) * values
    result, result_up = tl.sum(acc, axis=1), tl.sum(acc_up, axis=1)
    if BIAS:
        result += tl.load(bias + w_row, mask=real, other=0.0).to(tl.float32)
        if GATED:
            result_up += tl.load(bias + w_row + outputs, mask=real, other=0.0).to(tl.float32)
    result = unit_of_expert(result, result_up, out.dtype.element_ty, GATED, GATE, ALPHA, LIMIT)
    tl.store(out + pair * outputs + output, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _down_row_kernel(
    x, weight, bias, weights, experts, out, outputs, INNER: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_COUNT: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr, BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    choice = tl.arange(0, BLOCK_COUNT)
    inner = tl.arange(0, BLOCK_INNER)
    pair = token * COUNT + choice
    x_at = x + pair[:, None] * INNER + inner[None, :]
    wait_for_inputs(OVERLAP)
    expert = tl.load(experts + pair, mask=choice < COUNT, other=-1).to(tl.int64)
    mine = expert >= 0
    real = (output < outputs)[:, None] & mine[None, :]
    # [BLOCK_OUTPUTS, BLOCK_COUNT]
    row = expert[None, :] * outputs + output[:, None]
    share = tl.load(weights + pair, mask=mine, other=0.0)
    at = weight + row[:, :, None] * INNER + inner[None, None, :]
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_COUNT, BLOCK_INNER], tl.float32)
    for first in tl.range(0, INNER, BLOCK_INNER, loop_unroll_factor=4):
        known = first + inner < INNER
        w = tl.load(at + first, mask=real[:, :, None] & known[None, None, :], other=0.0)
        values = tl.load(x_at + first, mask=mine[:, None] & known[None, :], other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * values[None, :, :]
    results = tl.sum(acc, axis=2)
    if BIAS:
        results += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)
    total = tl.sum(results * share[None, :], axis=1)
    tl.store(out + token * outputs + output, total.to(out.dtype.element_ty), mask=output < outputs)


# One compiled kernel serves all numbers of blocks.
@triton.jit(do_not_specialize=["blocks"])
def _blocks_kernel(
    x, weight, bias, order, block_experts, out, outputs, inner_size, pairs_per_row, blocks,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    block, tile = tile_of(tl.program_id(0), blocks, tl.cdiv(outputs, BLOCK_OUTPUTS))
    output = tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INNER)
    wait_for_inputs(OVERLAP)
    expert = tl.load(block_experts + block)
    if expert < 0:
        return
    pair = tl.load(order + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    # Outputs beyond the last one read other weights, and rows without a pair read the first row, so that loads need no
    # mask. Their results are not stored.
    halves: tl.constexpr = 2 if GATED else 1
    w_row = expert * halves * outputs + tl.minimum(output, outputs - 1).to(tl.int64)
    w_at = weight + w_row[:, None] * inner_size + inner[None, :]
    up_at = w_at + tl.cast(outputs, tl.int64) * inner_size
    x_at = x + (tl.maximum(pair, 0) // pairs_per_row)[None, :] * inner_size + inner[:, None]
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    acc_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for first in range(0, inner_size, BLOCK_INNER):
        known = first + inner < inner_size
        values = load_tile(x_at + first, known[:, None], EVEN)
        w = load_tile(w_at + first, known[None, :], EVEN)
        acc = tl.dot(w, values, acc, input_precision="ieee")
        if GATED:
            w_up = load_tile(up_at + first, known[None, :], EVEN)
            acc_up = tl.dot(w_up, values, acc_up, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + w_row).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias + w_row + outputs).to(tl.float32)[:, None]
    acc = unit_of_expert(acc, acc_up, out.dtype.element_ty, GATED, GATE, ALPHA, LIMIT)
    at = out + pair[None, :] * outputs + output[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & (pair >= 0)[None, :])


@triton.jit
def _sum_kernel(
    results, weights, experts, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(COUNT):
        pair = token * COUNT + choice
        real = (column < SIZE) & (tl.load(experts + pair) >= 0)
        result = tl.load(results + pair * SIZE + column, mask=real, other=0.0).to(tl.float32)
        total += result * tl.load(weights + pair)
    tl.store(out + token * SIZE + column, total.to(out.dtype.element_ty), mask=column < SIZE)


def _by_rows(
    x: torch.Tensor, held: ExpertWeights, weights: torch.Tensor, experts: torch.Tensor, config: ExpertsConfig
) -> torch.Tensor:
    tokens, count = experts.shape
    _, hidden, size = held.down.shape
    inner, out = x.new_empty(tokens * count, size), torch.empty_like(x)
    options = overlap_options(x.device)
    first, second = config.gate_up, config.down
    _gate_up_row_kernel[(tokens * count, triton.cdiv(size, first.block_outputs))](
        x, held.gate_up, held.gate_up if held.gate_up_bias is None else held.gate_up_bias, experts, inner, size,
        INNER=hidden, COUNT=count, BLOCK_OUTPUTS=first.block_outputs, BLOCK_INNER=first.block_inner,
        BIAS=held.gate_up_bias is not None, num_warps=first.num_warps, **gate_options(held.gate), **options,
    )  # fmt: skip
    _down_row_kernel[(tokens, triton.cdiv(hidden, second.block_outputs))](
        inner, held.down, held.down if held.down_bias is None else held.down_bias, weights, experts, out, hidden,
        INNER=size, COUNT=count, BLOCK_COUNT=triton.next_power_of_2(count), BLOCK_OUTPUTS=second.block_outputs,
        BLOCK_INNER=second.block_inner, BIAS=held.down_bias is not None, num_warps=second.num_warps, **options,
    )  # fmt: skip
    return out


def _by_blocks(
    x: torch.Tensor, held: ExpertWeights, weights: torch.Tensor, experts: torch.Tensor, config: ExpertsConfig
) -> torch.Tensor:
    tokens, count = experts.shape
    num_experts, hidden, size = held.down.shape
    groups = group_pairs(experts, num_experts, config.block_rows)
    results = x.new_empty(tokens * count, hidden)
    if config.hopper:
        hopper_experts(x, held, groups, results, count, config)
        return add_pairs(results, weights, experts)
    inner = x.new_empty(tokens * count, size)
    options = overlap_options(x.device)
    # The rows of x belong to tokens, those of `inner` to pairs.
    for values, weight, bias, to, rows, tiles, gate in (
        (x, held.gate_up, held.gate_up_bias, inner, count, config.gate_up, held.gate),
        (inner, held.down, held.down_bias, results, 1, config.down, None),
    ):
        outputs, inner_size = to.shape[1], values.shape[1]
        blocks = len(groups.block_experts)
        _blocks_kernel[(blocks * triton.cdiv(outputs, tiles.block_outputs),)](
            values, weight, weight if bias is None else bias, *groups, to, outputs, inner_size, rows, blocks,
            BLOCK_ROWS=config.block_rows, BLOCK_OUTPUTS=tiles.block_outputs, BLOCK_INNER=tiles.block_inner,
            EVEN=inner_size % tiles.block_inner == 0, BIAS=bias is not None, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages, **gate_options(gate), **options,
        )  # fmt: skip
    return add_pairs(results, weights, experts)


def add_pairs(results: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of the results of each token's pairs, [T, hidden]. results: [pairs, hidden]."""
    tokens, count = experts.shape
    hidden = results.shape[1]
    out = results.new_empty(tokens, hidden)
    block = min(triton.next_power_of_2(hidden), 1024)
    _sum_kernel[(tokens, triton.cdiv(hidden, block))](
        results, weights, experts, out, SIZE=hidden, BLOCK=block, COUNT=count, num_warps=4,
        **overlap_options(out.device),
    )  # fmt: skip
    return out


def run_experts(
    x: torch.Tensor,
    held: ExpertWeights,
    weights: torch.Tensor,
    experts: torch.Tensor,
    config: ExpertsConfig | None = None,
) -> torch.Tensor:
    """Compute experts_reference. All tensors are contiguous. config: None = the fastest known."""
    if config is None:
        tokens, count = experts.shape
        num_experts, hidden, size = held.down.shape
        layer = ExpertLayer(count, held.layer_experts or num_experts, hidden, size)
        if x.element_size() == 2:
            watch(_NUMBERS, held, layer)
        config = experts_config(size_class(tokens), *layer, x.element_size(), x.device)
    run = _by_rows if config.block_rows == 1 else _by_blocks
    return run(x, held, weights, experts, config)


class _Numbers:
    """Implements Kind for experts of 16 bits."""

    rows, trusted = TOKENS, FIXED

    def numbers(self, weight: ExpertWeights) -> torch.Tensor:
        return weight.gate_up

    def format(self, weight: ExpertWeights) -> str:
        return ""

    def candidates(self, weight: ExpertWeights, shape: ExpertLayer, rows: int) -> list[ExpertsConfig]:
        found = experts_candidates(rows, shape, weight.down.device)
        if fits_hopper_experts(weight, weight.down.dtype):
            found += hopper_candidates(weight, rows, shape)
        return found

    def inputs(self, weight: ExpertWeights, shape: ExpertLayer, rows: int) -> tuple[torch.Tensor, ...]:
        x = random_rows(rows, shape.hidden, weight.down.dtype, weight.down.device)
        return x, *random_choice(rows, shape, len(weight.down), x.device)

    def compute(
        self, weight: ExpertWeights, shape: ExpertLayer, inputs: tuple[torch.Tensor, ...], config: ExpertsConfig
    ) -> torch.Tensor:
        x, factors, experts = inputs
        return run_experts(x, weight, factors, experts, config)


_NUMBERS = _Numbers()


def run_experts_fixed(
    x: torch.Tensor, held: ExpertWeights, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Compute experts_reference such that the bits of a token's result do not depend on the other tokens."""
    return run_experts(x, held, weights, experts, FIXED)
