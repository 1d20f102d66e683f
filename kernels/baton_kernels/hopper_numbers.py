"""Products with weights of 16 bits, and of 8 bits with scales, for Hopper.

The tensor cores read rows and weights from the shared memory to which TMA copies them. Where each step has its own
scales, its sums are multiplied by them while the tensor cores work for the other warp group or another program.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_products import Pairs, hopper_product, is_hopper, outputs_of
from .kernel_configs import LinearConfig
from .overlap import wait_for_inputs
from .reference.activation import ExpertGate
from .reference.quantize import QuantizedRows
from .reference.scaled_linear import ScaledWeight

# With more rows, FP8 sums stay in the tensor cores, which keep fewer bits than float32.
_FEW_ROWS = gl.constexpr(64)
# The numbers of columns that may share a scale. Such a group of columns is one step.
_COLUMNS = (64, 128, 256)


class _Scales(NamedTuple):
    """The scales of rows and of the weight; the zeros of rows, and the weight's sums, by which zeros are multiplied.

    row_stride, group_stride: the distances between the scales of rows, and of groups of columns. groups: the number of
    groups. scale_rows: how many scales an expert's outputs have per group. Compile-time facts: how many outputs share a
    scale, whether each step has its own scales (tiled), and whether there are zeros.
    """

    x: Any
    weight: Any
    zeros: Any
    sums: Any
    row_stride: Any
    group_stride: Any
    groups: Any
    scale_rows: Any
    outputs_per_scale: gl.constexpr
    tiled: gl.constexpr
    has_zeros: gl.constexpr


@gluon.constexpr_function
def _sums_layout(dtype, rows):
    """Return the layout of sums [outputs, rows]. An instruction multiplies 32 bytes of an output's weights."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 256 // dtype.primitive_bitwidth])


@gluon.jit
def _multiply(GROUP: gl.constexpr, operands, tiles, place, FLAGS: gl.constexpr):
    """Return the sums of a warp group over a program's steps, [outputs, rows]: float32, or int32 for integers."""
    STAGES: gl.constexpr = tiles.x.shape[0]
    ROWS: gl.constexpr = tiles.x.shape[1]
    OUTPUTS: gl.constexpr = tiles.weight.shape[1] // FLAGS.groups
    layout: gl.constexpr = _sums_layout(tiles.x.dtype, ROWS)
    acc = gl.zeros([OUTPUTS, ROWS], gl.int32 if tiles.x.dtype == gl.int8 else gl.float32, layout)
    for at in range(place.steps):
        stage = at % STAGES
        mbarrier.wait(tiles.full.index(stage), at // STAGES & 1)
        weight = tiles.weight.index(stage).slice(GROUP * OUTPUTS, OUTPUTS, 0)
        acc = warpgroup_mma(weight, tiles.x.index(stage).permute((1, 0)), acc, is_async=True)
        # The product of the previous step has ended, so its tiles may be overwritten.
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
        mbarrier.arrive(tiles.empty.index(gl.maximum(at - 1, 0) % STAGES), count=1, pred=at > 0)
    return warpgroup_mma_wait(num_outstanding=0, deps=[acc])


@gluon.jit
def _row_scales(scales, place, group, row, EXPERTS: gl.constexpr):
    """Return the scales of rows for a group of columns. row: places in the program's tile."""
    at = scales.x + (group * scales.group_stride + place.row.to(gl.int64) * scales.row_stride) + row * scales.row_stride
    if EXPERTS:
        # Blocks of rows are full, so no mask is needed. Without one, two adjacent scales are loaded at once.
        return gl.load(at)
    return gl.load(at, mask=row < place.rows - place.row, other=0.0)


@gluon.jit
def _multiply_each(GROUP: gl.constexpr, scales, tiles, place, w_at, row, FLAGS: gl.constexpr):
    """As _multiply, but accumulate the sums of each step in float32, times the scales of the step if it has its own.

    w_at: pointers to the first scales of outputs. row: indices of rows in the program's tile.
    """
    STAGES: gl.constexpr = tiles.x.shape[0]
    ROWS: gl.constexpr = tiles.x.shape[1]
    OUTPUTS: gl.constexpr = tiles.weight.shape[1] // FLAGS.groups
    layout: gl.constexpr = _sums_layout(tiles.x.dtype, ROWS)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    for at in range(place.steps):
        stage = at % STAGES
        mbarrier.wait(tiles.full.index(stage), at // STAGES & 1)
        weight = tiles.weight.index(stage).slice(GROUP * OUTPUTS, OUTPUTS, 0)
        nothing = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
        step = warpgroup_mma(weight, tiles.x.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if scales.tiled:
            # The tensor cores work while these arrive.
            group = place.first + at
            w_scale, x_scale = gl.load(w_at + group), _row_scales(scales, place, group, row, FLAGS.experts)
        step = warpgroup_mma_wait(num_outstanding=0, deps=[step])
        mbarrier.arrive(tiles.empty.index(stage), count=1)
        if scales.tiled:
            step *= w_scale[:, None] * x_scale[None, :]
        acc += step
    return acc


@gluon.jit
def _multiply_scaled(GROUP: gl.constexpr, scales, tiles, place, FLAGS: gl.constexpr):
    """Return the scaled sums of a warp group over a program's steps, [outputs, rows] float32."""
    ROWS: gl.constexpr = tiles.x.shape[1]
    OUTPUTS: gl.constexpr = tiles.weight.shape[1] // FLAGS.groups
    PER_SCALE: gl.constexpr = scales.outputs_per_scale
    layout: gl.constexpr = _sums_layout(tiles.x.dtype, ROWS)
    output = outputs_of(gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout)), GROUP, OUTPUTS, place, FLAGS.gated)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    w_at = scales.weight + (place.expert * scales.scale_rows + output // PER_SCALE) * scales.groups
    if scales.tiled:
        # The kernel before may still write the scales of rows.
        wait_for_inputs(True)
    if scales.tiled or (tiles.x.dtype != gl.int8 and ROWS <= _FEW_ROWS):
        acc = _multiply_each(GROUP, scales, tiles, place, w_at, row, FLAGS)
    else:
        acc = _multiply(GROUP, (), tiles, place, FLAGS)
    # A part without steps has not yet waited for the kernel that writes the scales.
    wait_for_inputs(True)
    if scales.has_zeros and place.first == 0:
        zero = gl.load(scales.zeros + place.row + row, mask=row < place.rows - place.row, other=0)
        acc -= gl.load(scales.sums + place.base + output)[:, None] * zero[None, :]
    result = acc.to(gl.float32)
    if not scales.tiled:
        result *= gl.load(w_at)[:, None] * _row_scales(scales, place, 0, row, FLAGS.experts)[None, :]
    return result


def fits_hopper(weight: torch.Tensor) -> bool:
    """Whether hopper_numbers can multiply rows of the same type with a weight: TMA needs rows aligned to 16 bytes."""
    return weight.dtype in (torch.bfloat16, torch.float16) and weight.shape[-1] % 8 == 0 and is_hopper(weight.device)


def hopper_numbers(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    config: LinearConfig,
    out: torch.Tensor,
    pairs: Pairs | None = None,
    gate: ExpertGate = "silu",
) -> torch.Tensor:
    """Compute linear_reference into out where fits_hopper. pairs, gate: as in hopper_product."""
    return hopper_product(x, weight, _multiply, (), out, bias, gated, config, pairs, gate)


def fits_hopper_scaled(weight: ScaledWeight) -> bool:
    """Whether hopper_scaled can multiply rows with a weight."""
    inner, device = weight.codes.shape[-1], weight.codes.device
    return inner % 16 == 0 and (weight.tile[1] >= inner or weight.tile[1] in _COLUMNS) and is_hopper(device)


def hopper_scaled(
    x: QuantizedRows,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    gated: bool,
    config: LinearConfig,
    out: torch.Tensor,
    pairs: Pairs | None = None,
) -> torch.Tensor:
    """Compute scaled_linear_reference into out where fits_hopper_scaled.

    The scales of x may have any strides. pairs: as in hopper_product.
    """
    tiled = weight.tile[1] < x.codes.shape[1]
    if tiled:
        config = config._replace(block_inner=weight.tile[1])
    row_stride, group_stride = x.scales.stride()
    scales = _Scales(
        x.scales, weight.scales, x.codes if x.zeros is None else x.zeros, x.codes if x.zeros is None else weight.sums,
        row_stride, group_stride, weight.scales.shape[-1], weight.scales.shape[-2], gl.constexpr(weight.tile[0]),
        gl.constexpr(tiled), gl.constexpr(x.zeros is not None),
    )  # fmt: skip
    multiply = _multiply_scaled
    return hopper_product(x.codes, weight.codes, multiply, scales, out, bias, gated, config, pairs)
