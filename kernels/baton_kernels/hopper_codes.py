"""Products with weights of 4 bits in groups for Hopper, with the roles of warps written out.

One warp lets the copy engine fetch tiles of rows and of codes some steps ahead; before the preceding kernel ends, it
fetches codes only. One or two groups of four warps turn the codes of a step into numbers, in the registers from which
the tensor cores take them. While they do so, the tensor cores multiply what another group has decoded. So few rows take
as long as reading the codes, and many as long as products with weights of 16 bits.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .activation import gate_of_expert
from .code_pairs import numbers_of, words_layout
from .kernel_configs import LinearConfig
from .overlap import let_next_start, wait_for_inputs
from .pair_groups import PairGroups
from .parts import arrivals_of
from .reference.activation import ClampedGate
from .reference.grouped_linear import GroupedWeight
from .tile_order import tile_of

# Shared memory of a multiprocessor, and what a program needs of it beside its tiles.
_MEMORY, _BARRIERS = 227 << 10, 2 << 10
_REGISTERS = 65536  # of a multiprocessor
_FETCHING_WARPS = 4  # for which registers are set aside, though only one works
_FETCHING_REGISTERS = gl.constexpr(24)  # of a thread that fetches
_MOST_REGISTERS = 168  # of each thread of 12 warps that have a multiprocessor alone, when they start


@gluon.constexpr_function
def _scales_of_step(inner, group):
    """Return how many scales the columns of a step have for each output, each for the same number of columns."""
    return max(inner // (group & -group), 1)


@gluon.jit
def _fetch_codes(codes, tile, barrier, word, row, up_row, GATED: gl.constexpr):
    """Fetch the codes of one step: of outputs from `row` on. With gates, each group of warps has those of some gates,
    and of as many ups, the first of which is up_row."""
    rows: gl.constexpr = codes.block_type.shape[0]
    kinds: gl.constexpr = 2 if GATED else 1
    for group in gl.static_range(tile.shape[0] // rows // kinds):
        mine = tile.slice(group * kinds * rows, kinds * rows, 0)
        tma.async_copy_global_to_shared(codes, [row + group * rows, word], barrier, mine.slice(0, rows, 0))
        if GATED:
            tma.async_copy_global_to_shared(codes, [up_row + group * rows, word], barrier, mine.slice(rows, rows, 0))


@gluon.jit
def _fetch(x, codes, tiles, row, w_row, up_row, first, steps, GATED: gl.constexpr):
    """Fetch the tiles of all steps of a program."""
    x_tiles, c_tiles, full, empty = tiles
    STAGES: gl.constexpr = x_tiles.shape[0]
    INNER: gl.constexpr = x_tiles.shape[2]
    words: gl.constexpr = INNER // 4
    nbytes: gl.constexpr = x.block_type.nbytes + 2 * c_tiles.shape[1] * words
    ahead = gl.minimum(steps, STAGES)
    for at in range(ahead):
        mbarrier.expect(full.index(at), nbytes)
        _fetch_codes(codes, c_tiles.index(at), full.index(at), (first + at) * words, w_row, up_row, GATED)
    wait_for_inputs(True)
    for at in range(ahead):
        tma.async_copy_global_to_shared(x, [row, (first + at) * INNER], full.index(at), x_tiles.index(at))
    for at in range(ahead, steps):
        stage = at % STAGES
        barrier = full.index(stage)
        mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)
        mbarrier.expect(barrier, nbytes)
        _fetch_codes(codes, c_tiles.index(stage), barrier, (first + at) * words, w_row, up_row, GATED)
        tma.async_copy_global_to_shared(x, [row, (first + at) * INNER], barrier, x_tiles.index(stage))


@gluon.jit
def _load_scales(scales, zeros, w_row, column, groups, SIZE: gl.constexpr, ZEROS: gl.constexpr):
    """Return the scales and the zeros of columns, [outputs, columns], as they are stored. Columns beyond the last have
    the scale 0. w_row: the outputs' rows of the weight. SIZE: of a group."""
    group = column // SIZE
    at = w_row[:, None] * groups + group[None, :]
    known = (group < groups)[None, :]
    scale = gl.load(scales + at, mask=known, other=0)
    zero = scale
    if ZEROS:
        zero = gl.load(zeros + at, mask=known, other=0)
    return scale, zero


@gluon.jit
def _multiply(
    x_tiles, c_tiles, full, empty, scales, zeros, w_row, column, groups, first, steps, GROUP: gl.constexpr,
    sizes: gl.constexpr,
):  # fmt: skip
    """Return the products of a group of warps in a program's steps, [outputs, rows] float32.

    w_row: the rows of the weight, [outputs]. column: the first column of each of a step's scales.
    """
    STAGES: gl.constexpr = x_tiles.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    INNER: gl.constexpr = x_tiles.shape[2]
    OUTPUTS: gl.constexpr = w_row.shape[0]
    SIZE: gl.constexpr = sizes[0]
    KIND: gl.constexpr = sizes[1]
    ZEROS: gl.constexpr = sizes[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    # Scales are loaded a step early, as their loads are not in the background.
    scale, zero = _load_scales(scales, zeros, w_row, first * INNER + column, groups, SIZE, ZEROS)
    for at in range(steps):
        stage = at % STAGES
        following = (first + at + 1) * INNER + column
        next_scale, next_zero = _load_scales(scales, zeros, w_row, following, groups, SIZE, ZEROS)
        mbarrier.wait(full.index(stage), at // STAGES & 1)
        codes = c_tiles.index(stage).slice(GROUP * OUTPUTS, OUTPUTS, 0)
        words = codes.load(words_layout(OUTPUTS, INNER // 4))
        numbers = numbers_of(words, scale, zero, x_tiles.dtype, KIND, ZEROS)
        # Every thread has these numbers already.
        numbers = gl.convert_layout(numbers, operand, assert_trivial=True)
        acc = warpgroup_mma(numbers, x_tiles.index(stage).permute((1, 0)), acc, is_async=True)
        # The assembler does not know that the tensor cores still read the numbers' registers, so nothing may be
        # decoded before the product ends.
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
        scale, zero = next_scale, next_zero
    return acc


@gluon.jit
def _add_parts(acc, partial, arrivals, tile, part):
    """As add_parts in parts.py."""
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = acc.shape[1]
    size: gl.constexpr = acc.shape[0] * rows
    parts = gl.num_programs(1)
    output = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, rows, layout=gl.SliceLayout(0, layout))
    cell = partial + (tile * parts).to(gl.int64) * size + output[:, None] * rows + row[None, :]
    gl.store(cell + part * size, acc)
    tl.debug_barrier()
    last = gl.atomic_add(arrivals + tile, 1, sem="acq_rel") == parts - 1
    if last:
        # Parts are added up by index, so that the order in which programs finish changes no sum.
        gl.store(arrivals + tile, 0)
        acc = gl.zeros([acc.shape[0], rows], gl.float32, layout)
        for each in range(parts):
            acc += gl.load(cell + each * size, cache_modifier=".cg")
    return acc, last


@gluon.jit
def _gated(acc, DTYPE: gl.constexpr, clamp: gl.constexpr):
    """Return the gate's activation times up, [outputs, rows], of sums whose first half are gates."""
    half: gl.constexpr = acc.shape[0] // 2
    rows: gl.constexpr = acc.shape[1]
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 0, 1])
    # Both are rounded to the output's type before anything else is done with them, which halves what is exchanged.
    both = acc.to(DTYPE).reshape([2, half, rows]).permute((1, 2, 0))
    gate, up = gl.split(gl.convert_layout(both, pairs))
    return gate_of_expert(gate.to(gl.float32), up.to(gl.float32), DTYPE, clamp[0], clamp[1], clamp[2]).to(DTYPE)


@gluon.jit
def _rows_of_weight(inside, w_base, output, outputs, half: gl.constexpr):
    """Return the rows of the weight for places in a tile, whose second half, with gates, are ups. Outputs beyond the
    last one have the row of the last; their results are not stored."""
    return w_base + gl.minimum(output + inside % half, outputs - 1) + inside // half * outputs


@gluon.jit
def _store(acc, bias, order, out, row, rows, output, outputs, w_base, sizes: gl.constexpr):
    """Store the results of a tile's sums [outputs, rows]."""
    GATED: gl.constexpr = sizes[3]
    BIAS: gl.constexpr = sizes[4]
    ORDERED: gl.constexpr = sizes[5]
    half: gl.constexpr = acc.shape[0] // 2 if GATED else acc.shape[0]
    if BIAS:
        inside = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
        w_row = _rows_of_weight(inside, w_base, output, outputs, half)
        acc += gl.load(bias + w_row).to(gl.float32)[:, None]
    if GATED:
        result = _gated(acc, out.dtype.element_ty, sizes[7])
    else:
        result = acc.to(out.dtype.element_ty)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    column = output + gl.arange(0, half, layout=gl.SliceLayout(1, layout))
    at_row = row + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    here = at_row < rows
    if ORDERED:
        at_row = gl.load(order + at_row, mask=here, other=-1)
        here = at_row >= 0
    at = out + at_row.to(gl.int64)[None, :] * outputs + column[:, None]
    gl.store(at, gl.convert_layout(result, layout), mask=(column < outputs)[:, None] & here[None, :])


@gluon.jit
def _compute(GROUP: gl.constexpr, GROUPS: gl.constexpr, tensors, tiles, where, sizes: gl.constexpr):
    """Compute what one of the groups of warps has of a tile, and store it once all parts are added up."""
    scales, zeros, bias, order, out, partial, arrivals = tensors
    x_tiles, c_tiles, full, empty = tiles
    row, rows, output, outputs, w_base, groups, first, steps, tile, part = where
    OUTPUTS: gl.constexpr = c_tiles.shape[1] // GROUPS
    INNER: gl.constexpr = x_tiles.shape[2]
    SIZE: gl.constexpr = sizes[0]
    GATED: gl.constexpr = sizes[3]
    PARTED: gl.constexpr = sizes[6]
    half: gl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    count: gl.constexpr = _scales_of_step(INNER, SIZE)
    layout: gl.constexpr = words_layout(OUTPUTS, INNER // 4)
    by_scale: gl.constexpr = gl.full([OUTPUTS, INNER // 4], 0, gl.int16, layout).reshape(
        [OUTPUTS, count, INNER // 4 // count]
    ).type.layout  # fmt: skip
    of_scales: gl.constexpr = gl.SliceLayout(2, by_scale)
    output += GROUP * half
    inside = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, of_scales))
    w_row = _rows_of_weight(inside, w_base, output, outputs, half)
    column = gl.arange(0, count, layout=gl.SliceLayout(0, of_scales)) * (INNER // count)
    acc = _multiply(x_tiles, c_tiles, full, empty, scales, zeros, w_row, column, groups, first, steps, GROUP, sizes)
    # A part without steps has not waited for any input.
    wait_for_inputs(True)
    last = True
    if PARTED:
        acc, last = _add_parts(acc, partial, arrivals, tile * GROUPS + GROUP, part)
    if last:
        _store(acc, bias, order, out, row, rows, output, outputs, w_base, sizes)


# One compiled kernel serves every number of rows.
@gluon.jit(do_not_specialize=["rows", "row_tiles"])
def _hopper_codes_kernel(
    x, codes, scales, zeros, bias, order, block_experts, out, partial, arrivals, rows, row_tiles, outputs, inner_steps,
    groups, BLOCK_OUTPUTS: gl.constexpr, STAGES: gl.constexpr, PARTED: gl.constexpr, SIZE: gl.constexpr,
    KIND: gl.constexpr, ZEROS: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, EXPERTS: gl.constexpr,
    ORDERED: gl.constexpr, CLAMPED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_ROWS: gl.constexpr = x.block_type.shape[0]
    half: gl.constexpr = BLOCK_OUTPUTS // 2 if GATED else BLOCK_OUTPUTS
    let_next_start(True)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_ROWS, x.block_type.shape[1]], x.layout)
    c_tiles = gl.allocate_shared_memory(codes.dtype, [STAGES, BLOCK_OUTPUTS, codes.block_type.shape[1]], codes.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    tile, part = gl.program_id(0), gl.program_id(1)
    row_tile, output_tile = tile_of(tile, row_tiles, gl.cdiv(outputs, half))
    row, output = row_tile * BLOCK_ROWS, output_tile * half
    each = gl.cdiv(inner_steps, gl.num_programs(1))
    first = part * each
    steps = gl.maximum(gl.minimum(each, inner_steps - first), 0)
    w_base = 0
    if EXPERTS:
        wait_for_inputs(True)
        expert = gl.load(block_experts + row_tile)
        w_base = gl.maximum(expert, 0) * (outputs * (2 if GATED else 1))
        # Blocks that are not used have nothing to compute and to store.
        steps = gl.where(expert < 0, 0, steps)
        rows = gl.where(expert < 0, 0, rows)
    sizes: gl.constexpr = (SIZE, KIND, ZEROS, GATED, BIAS, ORDERED, PARTED, (CLAMPED, ALPHA, LIMIT))
    tensors = (scales, zeros, bias, order, out, partial, arrivals)
    tiles = (x_tiles, c_tiles, full, empty)
    where = (row, rows, output, outputs, w_base, groups, first, steps, tile, part)
    w_row = w_base + output
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_compute, (0, 1, tensors, tiles, where, sizes)),
                (_fetch, (x, codes, tiles, row, w_row, w_row + outputs, first, steps, GATED)),
            ],
            [1],
            [_FETCHING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (0, 2, tensors, tiles, where, sizes)),
                (_compute, (1, 2, tensors, tiles, where, sizes)),
                (_fetch, (x, codes, tiles, row, w_row, w_row + outputs, first, steps, GATED)),
            ],
            [4, 1],
            [REGISTERS, _FETCHING_REGISTERS],
        )


def has_hopper_kernel(weight: GroupedWeight, dtype: torch.dtype) -> bool:
    """Whether the products of inputs with a weight are computed here. dtype: of the inputs."""
    kinds = {"int4": (torch.bfloat16, torch.float16), "e2m1": (torch.bfloat16,)}
    fits = dtype in kinds.get(weight.kind, ()) and (weight.kind == "int4" or weight.scales.dtype == torch.uint8)
    return fits and _is_hopper(weight.codes.device)


def hopper_codes(
    x: torch.Tensor,
    weight: GroupedWeight,
    bias: torch.Tensor | None,
    gated: bool,
    config: LinearConfig,
    out: torch.Tensor | None = None,
    clamp: ClampedGate | None = None,
    groups: PairGroups | None = None,
    ordered: bool = False,
) -> torch.Tensor:
    """Compute grouped_linear_reference, x: [rows, inputs], where has_hopper_kernel. All tensors are contiguous.

    With groups, the weight and the bias have experts as their first dimension, and each block of config.block_rows rows
    is multiplied with those of its expert. ordered: results go to the rows of `out` that groups.order names; others
    keep the rows of x. clamp: of the gate, as in QuantizedExperts.
    """
    rows, inner = x.shape
    outputs = weight.codes.shape[-2] // (2 if gated else 1)
    if out is None:
        out = x.new_empty(rows, outputs)
    half, warp_groups = config.block_outputs // (2 if gated else 1), config.num_warps // 4
    block, c_block = [config.block_rows, config.block_inner], [half // warp_groups, config.block_inner // 4]
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    words = weight.codes.shape[-1]
    tiles = [
        TensorDescriptor(x, [rows, inner], [inner, 1], block, gl.NVMMASharedLayout.get_default_for(block, kind)),
        TensorDescriptor(
            weight.codes, [weight.codes.numel() // words, words], [words, 1], c_block,
            gl.NVMMASharedLayout.get_default_for(c_block, gl.int16),
        ),
    ]  # fmt: skip
    row_tiles = triton.cdiv(rows, config.block_rows)
    programs = triton.cdiv(outputs, half) * row_tiles
    partial = out
    if config.splits > 1:
        cells = programs * config.splits * config.block_outputs * config.block_rows
        partial = torch.empty(cells, dtype=torch.float32, device=x.device)
    _hopper_codes_kernel[(programs, config.splits)](
        *tiles, weight.scales, weight.codes if weight.zeros is None else weight.zeros, out if bias is None else bias,
        *(groups or (out, out)), out, partial, arrivals_of(x.device), rows, row_tiles, outputs,
        triton.cdiv(inner, config.block_inner), weight.scales.shape[-1],
        BLOCK_OUTPUTS=config.block_outputs, STAGES=config.num_stages, PARTED=config.splits > 1,
        SIZE=inner // weight.scales.shape[-1], KIND=weight.kind, ZEROS=weight.zeros is not None, GATED=gated,
        BIAS=bias is not None, EXPERTS=groups is not None, ORDERED=ordered, CLAMPED=clamp is not None,
        ALPHA=clamp.alpha if clamp else 1.0, LIMIT=clamp.limit if clamp else 0.0, GROUPS=warp_groups, num_warps=4,
        launch_pdl=True, **_registers(config),
    )  # fmt: skip
    return out


@functools.cache
def _registers(config: LinearConfig) -> dict[str, int]:
    """Return the registers of a thread that computes, and the launch option that lets as many programs share a
    multiprocessor as its memory has room for."""
    stage = config.block_inner * (2 * config.block_rows + config.block_outputs // 2)
    programs = min(_MEMORY // (stage * config.num_stages + _BARRIERS), 3 if config.num_warps == 4 else 2)
    sums = config.block_rows * config.block_outputs // (32 * config.num_warps)
    warps = config.num_warps + _FETCHING_WARPS
    # A program with many sums needs the registers.
    alone = programs < 2 or sums > 32
    each = _MOST_REGISTERS if alone else _REGISTERS // (programs * 32 * warps) // 8 * 8
    # Threads that fetch give registers to those that compute.
    computing = (each * warps - _FETCHING_REGISTERS.value * _FETCHING_WARPS) // config.num_warps // 8 * 8
    return {"REGISTERS": min(computing, 240)} | ({} if alone else {"maxnreg": each})


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
