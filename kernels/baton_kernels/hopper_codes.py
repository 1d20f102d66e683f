"""Products with weights of 4 bits in groups for Hopper.

A warp group decodes the codes of a step into the registers from which the tensor cores take their operands. Meanwhile
the tensor cores multiply the weights that the other group has decoded. So a product of few rows takes as long as
reading the codes, and one of many rows as long as with 16-bit weights.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .code_pairs import numbers_of, words_layout
from .hopper_products import Pairs, hopper_product, is_hopper, outputs_of
from .kernel_configs import LinearConfig
from .reference.grouped_linear import GroupedWeight


class _Scales(NamedTuple):
    """The scales of a weight, its zeros or factors, the number of groups in a row, and compile-time facts: the columns
    of a group, the kind of the codes, and which of "zeros" and "factors" there are ("" = neither)."""

    scales: Any
    beside: Any
    groups: Any
    size: gl.constexpr
    kind: gl.constexpr
    has: gl.constexpr


@gluon.constexpr_function
def _scales_of_step(inner, group):
    """Return how many scales each output has in one step. Each scale covers the same number of columns."""
    return max(inner // (group & -group), 1)


@gluon.jit
def _load_scales(scales, beside, w_row, column, groups, SIZE: gl.constexpr, BESIDE: gl.constexpr):
    """Return the scales and the zeros of columns, [outputs, columns], as they are stored. Columns beyond the last have
    the scale 0. w_row: the outputs' rows of the weight. SIZE: of a group."""
    group = column // SIZE
    at = w_row[:, None] * groups + group[None, :]
    known = (group < groups)[None, :]
    scale = gl.load(scales + at, mask=known, other=0)
    zero = scale
    if BESIDE == "zeros":
        zero = gl.load(beside + at, mask=known, other=0)
    return scale, zero


@gluon.jit
def _multiply(GROUP: gl.constexpr, operands, tiles, place, FLAGS: gl.constexpr):
    """Return the sums of a warp group over a program's steps, [outputs, rows] float32."""
    scales, beside, groups = operands.scales, operands.beside, operands.groups
    SIZE: gl.constexpr = operands.size
    KIND: gl.constexpr = operands.kind
    BESIDE: gl.constexpr = operands.has
    STAGES: gl.constexpr = tiles.x.shape[0]
    ROWS: gl.constexpr = tiles.x.shape[1]
    INNER: gl.constexpr = tiles.x.shape[2]
    OUTPUTS: gl.constexpr = tiles.weight.shape[1] // FLAGS.groups
    count: gl.constexpr = _scales_of_step(INNER, SIZE)
    words: gl.constexpr = words_layout(OUTPUTS, INNER // 4)
    by_scale: gl.constexpr = gl.full([OUTPUTS, INNER // 4], 0, gl.int16, words).reshape(
        [OUTPUTS, count, INNER // 4 // count]
    ).type.layout  # fmt: skip
    of_scales: gl.constexpr = gl.SliceLayout(2, by_scale)
    inside = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, of_scales))
    w_row = place.base + outputs_of(inside, GROUP, OUTPUTS, place, FLAGS.gated)
    column = gl.arange(0, count, layout=gl.SliceLayout(0, of_scales)) * (INNER // count)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    # Scales are loaded one step early, because their loads are not asynchronous.
    scale, zero = _load_scales(scales, beside, w_row, place.first * INNER + column, groups, SIZE, BESIDE)
    for at in range(place.steps):
        stage = at % STAGES
        following = (place.first + at + 1) * INNER + column
        next_scale, next_zero = _load_scales(scales, beside, w_row, following, groups, SIZE, BESIDE)
        mbarrier.wait(tiles.full.index(stage), at // STAGES & 1)
        codes = tiles.weight.index(stage).slice(GROUP * OUTPUTS, OUTPUTS, 0)
        numbers = numbers_of(codes.load(words), scale, zero, tiles.x.dtype, KIND, BESIDE)
        # Each thread already has the elements of this layout, so nothing moves.
        numbers = gl.convert_layout(numbers, operand, assert_trivial=True)
        acc = warpgroup_mma(numbers, tiles.x.index(stage).permute((1, 0)), acc, is_async=True)
        # The assembler does not know that the tensor cores still read the numbers' registers, so nothing may be decoded
        # before the product ends.
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(tiles.empty.index(stage), count=1)
        scale, zero = next_scale, next_zero
    if BESIDE == "factors":
        output = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
        factor = gl.load(beside + place.base + outputs_of(output, GROUP, OUTPUTS, place, FLAGS.gated))
        acc *= (factor * 256.0).expand_dims(1)
    return acc


def has_hopper_kernel(weight: GroupedWeight, dtype: torch.dtype) -> bool:
    """Whether this module computes products with a weight. dtype: of the inputs."""
    kinds = {"int4": (torch.bfloat16, torch.float16), "e2m1": (torch.bfloat16,)}
    small = weight.scales.dtype in (torch.uint8, torch.int16)
    fits = dtype in kinds.get(weight.kind, ()) and (weight.kind == "int4" or small)
    return fits and is_hopper(weight.codes.device)


def hopper_codes(
    x: torch.Tensor,
    weight: GroupedWeight,
    bias: torch.Tensor | None,
    gated: bool,
    config: LinearConfig,
    out: torch.Tensor,
    pairs: Pairs | None = None,
) -> torch.Tensor:
    """Compute grouped_linear_reference, x: [rows, inputs], where has_hopper_kernel. All tensors are contiguous.

    pairs: as in hopper_product.
    """
    inner = x.shape[1]
    groups, (has, beside) = weight.scales.shape[-1], weight.beside
    operands = _Scales(
        weight.scales, beside, groups, gl.constexpr(inner // groups), gl.constexpr(weight.kind), gl.constexpr(has)
    )
    return hopper_product(x, weight.codes, _multiply, operands, out, bias, gated, config, pairs)
