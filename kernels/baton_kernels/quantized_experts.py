"""Products with the quantized weights of experts, for pairs of a token and one of its experts.

Pairs are grouped by expert into blocks of rows (pair_groups.py). Each pair has its own result, and a last kernel adds
up the results of a token. For few tokens, 8-bit rows may also be multiplied one at a time (scaled_expert_rows.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .activation import gate_options, unit_of_expert
from .experts import add_pairs
from .grouped_codes import grouped_operands, multiply
from .grouped_linear import grouped_format
from .hopper_experts import candidates as hopper_candidates
from .hopper_experts import fits_hopper_experts, hopper_experts
from .kernel_configs import ExpertLayer, ExpertsConfig, ProductConfig
from .overlap import let_next_start, overlap_options, wait_for_inputs
from .pair_groups import PairGroups, group_pairs
from .reference.activation import is_gated
from .reference.grouped_linear import GroupedWeight
from .reference.quantized_experts import QuantizedExperts
from .reference.scaled_linear import ScaledWeight
from .scaled_expert_rows import round_rows, run_scaled_rows
from .scaled_linear import add_step, format_of, load_tile
from .size_class import size_class
from .tile_order import tile_of
from .tuning import compile_experts_first, quantized_experts_config
from .unmeasured import coded_experts_candidates, scaled_rows_candidates
from .unmeasured_products import TOKENS, random_choice, random_rows, watch

FIXED = ExpertsConfig(16, ProductConfig(64, 128, 4, 3), ProductConfig(64, 128, 4, 3))


@triton.jit
def _finish(
    acc, acc_up, bias, w_row, pair, output, out, outputs, GATED: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store the results of pairs. Their sums are [outputs, rows] in float32."""
    if BIAS:
        acc += tl.load(bias + w_row).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(bias + w_row + outputs).to(tl.float32)[:, None]
    acc = unit_of_expert(acc, acc_up, out.dtype.element_ty, GATED, GATE, ALPHA, LIMIT)
    at = out + pair[None, :] * outputs + output[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & (pair >= 0)[None, :])


# One compiled kernel serves all numbers of blocks.
@triton.jit(do_not_specialize=["blocks"])
def _grouped_kernel(
    x, codes, scales, beside, table, bias, order, block_experts, out, outputs, units, code_columns, groups,
    pairs_per_row, blocks, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, UNITS: tl.constexpr,
    UNIT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr, BESIDE: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    block, tile = tile_of(tl.program_id(0), blocks, tl.cdiv(outputs, BLOCK_OUTPUTS))
    output = tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    wait_for_inputs(OVERLAP)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    halves: tl.constexpr = 2 if GATED else 1
    # Outputs beyond the last one and rows without a pair read those of others. Their results are not stored.
    w_row = expert * halves * outputs + tl.minimum(output, outputs - 1)
    x_row = x + (tl.maximum(pair, 0) // pairs_per_row)[None, :] * (units * UNIT)
    here = (pair > -2)[None, :]
    acc, acc_up = multiply(
        x_row, here, codes, scales, beside, table, w_row, w_row + outputs, 0, tl.cdiv(units, UNITS), units,
        code_columns, groups, UNITS, UNIT, GROUP, KIND, FOUR, BESIDE, EVEN, GATED,
    )  # fmt: skip
    _finish(acc, acc_up, bias, w_row, pair, output, out, outputs, GATED, BIAS, GATE, ALPHA, LIMIT)


@triton.jit(do_not_specialize=["blocks"])
def _scaled_kernel(
    x, x_scales, weight, w_scales, bias, order, block_experts, out, outputs, inner_size, groups, scale_rows,
    pairs_per_row, blocks, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    TILED: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, INTEGERS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    block, tile = tile_of(tl.program_id(0), blocks, tl.cdiv(outputs, BLOCK_OUTPUTS))
    output = tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INNER)
    wait_for_inputs(OVERLAP)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    row = tl.maximum(pair, 0) // pairs_per_row
    halves: tl.constexpr = 2 if GATED else 1
    # Outputs beyond the last one and rows without a pair read those of others. Their results are not stored.
    inside = tl.minimum(output, outputs - 1)
    w_row = expert * halves * outputs + inside
    w_at = weight + w_row[:, None] * inner_size + inner[None, :]
    up_at = w_at + tl.cast(outputs, tl.int64) * inner_size
    x_at = x + row[None, :] * inner_size + inner[:, None]
    w_scale_at = w_scales + (expert * scale_rows + inside // ROWS_PER_SCALE) * groups
    up_scale_at = w_scales + (expert * scale_rows + (inside + outputs) // ROWS_PER_SCALE) * groups
    x_scale_at = x_scales + row * groups
    acc = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.int32 if INTEGERS else tl.float32)
    acc_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.int32 if INTEGERS else tl.float32)
    for first in range(0, inner_size, BLOCK_INNER):
        known = first + inner < inner_size
        values = load_tile(x_at + first, known[:, None], EVEN)
        at = first // BLOCK_INNER if TILED else 0
        x_scale = tl.load(x_scale_at + at)
        acc = add_step(
            acc, values, w_at + first, known, w_scale_at + at, x_scale, INTEGERS, TILED, EVEN, BLOCK_ROWS > 64
        )
        if GATED:
            acc_up = add_step(acc_up, values, up_at + first, known, up_scale_at + at, x_scale, INTEGERS, TILED, EVEN,
                              BLOCK_ROWS > 64)  # fmt: skip
    result, result_up = acc.to(tl.float32), acc_up.to(tl.float32)
    if not TILED:
        x_scale = tl.load(x_scale_at)[None, :]
        result *= tl.load(w_scale_at)[:, None] * x_scale
        if GATED:
            result_up *= tl.load(up_scale_at)[:, None] * x_scale
    _finish(result, result_up, bias, w_row, pair, output, out, outputs, GATED, BIAS, GATE, ALPHA, LIMIT)


def experts_format(held: QuantizedExperts) -> str:
    """Return the name of the weights' format in the tables of measured configurations."""
    assert not isinstance(held.gate_up, torch.Tensor)
    return grouped_format(held.gate_up) if isinstance(held.gate_up, GroupedWeight) else format_of(held.gate_up)


def _default(pairs: int, experts: int) -> ExpertsConfig:
    """Return the tile sizes for a shape that was not measured.

    There are only two: one for steps in CUDA graphs, one for the largest steps. Both are compiled at start. Any other
    one would be compiled while requests are served.
    """
    tiles = ProductConfig(64, 128, 4, 3)
    return ExpertsConfig(16 if pairs <= 16 * experts else 64, tiles, tiles)


def run_quantized_experts(
    x: torch.Tensor,
    held: QuantizedExperts,
    weights: torch.Tensor,
    experts: torch.Tensor,
    config: ExpertsConfig | None = None,
) -> torch.Tensor:
    """Compute quantized_experts_reference for weights in codes. All tensors are contiguous. config: None = the fastest
    known."""
    tokens, count = experts.shape
    assert not isinstance(held.gate_up, torch.Tensor)
    assert not isinstance(held.down, torch.Tensor)
    num_experts, rows, _ = held.gate_up.codes.shape
    hidden, size = x.shape[1], rows // 2 if is_gated(held.gate) else rows
    if config is None:
        whole_layer = held.layer_experts or num_experts
        layer = ExpertLayer(count, whole_layer, hidden, size)
        watch(_Codes(x.dtype), held, layer)
        shape = experts_format(held), *layer, x.device
        for each in compile_experts_first(*shape):
            run_quantized_experts(x[:1], held, weights[:1], experts[:1], each)
        config = quantized_experts_config(size_class(tokens), *shape)
        if config is None:
            config = _default(size_class(tokens) * count, whole_layer)._replace(hopper=_codes_on_hopper(held, x.dtype))
    if config.block_rows == 1:
        return run_scaled_rows(x, held, weights, experts, config)
    groups = group_pairs(experts, num_experts, config.block_rows)
    results = x.new_empty(tokens * count, hidden)
    if config.hopper:
        hopper_experts(x, held, groups, results, count, config)
    else:
        # The rows of x belong to tokens, those of `inner` to pairs.
        inner = x.new_empty(tokens * count, size)
        block_rows = config.block_rows
        _product(x, held.gate_up, held.gate_up_bias, held, experts, groups, inner, count, block_rows, config.gate_up)
        _product(inner, held.down, held.down_bias, held, experts, groups, results, 1, block_rows, config.down)
    return add_pairs(results, weights, experts)


class _Codes(NamedTuple):
    """Implements Kind. dtype: of tokens."""

    dtype: torch.dtype

    @property
    def rows(self) -> tuple[int, ...]:
        return TOKENS

    @property
    def trusted(self) -> ExpertsConfig:
        return FIXED

    def numbers(self, weight: QuantizedExperts) -> torch.Tensor:
        return weight.gate_up if isinstance(weight.gate_up, torch.Tensor) else weight.gate_up.codes

    def format(self, weight: QuantizedExperts) -> str:
        return experts_format(weight)

    def candidates(self, weight: QuantizedExperts, shape: ExpertLayer, rows: int) -> list[ExpertsConfig]:
        default, scales = _default(rows * shape.used, shape.experts), weight.gate_up
        found = []
        if fits_hopper_experts(weight, self.dtype):
            found = hopper_candidates(weight, rows, shape)
        if isinstance(scales, GroupedWeight):
            return found or [default]
        assert isinstance(scales, ScaledWeight)
        inner = scales.tile[1] if scales.tile[1] < shape.hidden else 0
        if weight.rows is not None and weight.rows.symmetric:
            found += scaled_rows_candidates(rows, shape)
        return list(dict.fromkeys([default, *coded_experts_candidates(rows, shape, inner), *found]))

    def inputs(self, weight: QuantizedExperts, shape: ExpertLayer, rows: int) -> tuple[torch.Tensor, ...]:
        codes = self.numbers(weight)
        x = random_rows(rows, shape.hidden, self.dtype, codes.device)
        return x, *random_choice(rows, shape, len(codes), x.device)

    def compute(
        self, weight: QuantizedExperts, shape: ExpertLayer, inputs: tuple[torch.Tensor, ...], config: ExpertsConfig
    ) -> torch.Tensor:
        x, factors, experts = inputs
        return run_quantized_experts(x, weight, factors, experts, config)


def _product(
    x: torch.Tensor,
    weight: GroupedWeight | ScaledWeight,
    bias: torch.Tensor | None,
    held: QuantizedExperts,
    experts: torch.Tensor,
    groups: PairGroups,
    out: torch.Tensor,
    pairs_per_row: int,
    block_rows: int,
    tiles: ProductConfig,
) -> None:
    """Store the products of rows x with the weights of the experts of their pairs, [pairs, outputs], in out."""
    outputs, blocks = out.shape[1], len(groups.block_experts)
    flags: dict[str, Any] = {
        "BLOCK_ROWS": block_rows, "BLOCK_OUTPUTS": tiles.block_outputs, "BIAS": bias is not None,
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
        **gate_options(held.gate if weight is held.gate_up else None),
    }  # fmt: skip
    grid = (blocks * triton.cdiv(outputs, tiles.block_outputs),)
    added = out if bias is None else bias
    if isinstance(weight, GroupedWeight):
        tensors, sizes, kinds = grouped_operands(weight, tiles.block_inner)
        _grouped_kernel[grid](
            x, *tensors, added, *groups, out, outputs, *sizes, pairs_per_row, blocks,
            EVEN=sizes[0] % kinds["UNITS"] == 0, **kinds, **flags,
        )  # fmt: skip
        return
    rows, pairs_per_row = round_rows(x, held.rounding(int(weight is held.down)), experts, pairs_per_row)
    tiled = weight.tile[1] < x.shape[1]
    block_inner = weight.tile[1] if tiled else tiles.block_inner
    _scaled_kernel[grid](
        rows.codes, rows.scales, weight.codes, weight.scales, added, *groups, out, outputs, x.shape[1],
        rows.scales.shape[1], weight.scales.shape[1], pairs_per_row, blocks, BLOCK_INNER=block_inner, TILED=tiled,
        ROWS_PER_SCALE=weight.tile[0], INTEGERS=weight.codes.dtype == torch.int8,
        EVEN=x.shape[1] % block_inner == 0, **flags, **overlap_options(x.device),
    )  # fmt: skip


def _codes_on_hopper(held: QuantizedExperts, dtype: torch.dtype) -> bool:
    """Whether the weights are 4-bit codes, which Hopper's kernel always multiplies faster than this module's kernel.

    dtype: of tokens.
    """
    return isinstance(held.gate_up, GroupedWeight) and fits_hopper_experts(held, dtype)


def run_quantized_experts_fixed(
    x: torch.Tensor, held: QuantizedExperts, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Compute quantized_experts_reference such that the bits of a token's result do not depend on the others."""
    return run_quantized_experts(x, held, weights, experts, FIXED._replace(hopper=_codes_on_hopper(held, x.dtype)))
