"""A warp-specialized kernel for products with weights of any format on Hopper.

One warp issues TMA loads of tiles of rows and weights, some steps ahead; before the preceding kernel ends, it loads
only weights. One or two warp groups multiply the tiles that have arrived, each for its own outputs, with a function for
the format of the weight, from hopper_codes.py or hopper_numbers.py.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .activation import activated, gate_of_expert, gate_options
from .kernel_configs import LinearConfig
from .overlap import let_next_start, wait_for_inputs
from .pair_groups import PairGroups
from .parts import arrivals_of
from .reference.activation import ExpertGate
from .tile_order import tile_of

# Shared memory of a multiprocessor, and the part of it that a program needs for its barriers.
_MEMORY, _BARRIERS = 227 << 10, 2 << 10
_REGISTERS = 65536  # of a multiprocessor
_FETCHING_WARPS = 4  # warps that have registers for loading, though only one of them works
_FETCHING_REGISTERS = gl.constexpr(24)  # of a thread of these warps
_MOST_REGISTERS = 168  # of each thread at the start of a program of 12 warps that has a multiprocessor alone


class Flags(NamedTuple):
    """The compile-time facts of a product. groups: the number of warp groups that multiply. experts: rows are pairs.
    ordered: results go to the rows that an order names. parted: sums are cut into parts (split-K). gated, gate, alpha,
    limit: as gate_options returns them."""

    groups: int
    bias: bool
    experts: bool
    ordered: bool
    parted: bool
    gated: bool
    gate: str
    alpha: float
    limit: float


class Pairs(NamedTuple):
    """The rows of a product with the weights of experts: pairs in the order of groups. Each block of rows is multiplied
    with the weight of its expert; weight and bias have the expert as their first dimension. ordered: results go to the
    rows that groups.order names, otherwise they keep the order of the groups. gate: as in QuantizedExperts, for the
    first of the two products; None = the second one."""

    groups: PairGroups
    ordered: bool = False
    gate: ExpertGate | None = None


class Tiles(NamedTuple):
    """Shared memory: tiles of rows [stages, rows, columns] and of the weight [stages, outputs, columns or words], and
    the barriers that signal that a stage is full or empty."""

    x: Any
    weight: Any
    full: Any
    empty: Any


class Results(NamedTuple):
    """The tensors for storing results. order: of the rows. partial, arrivals: as in add_parts of parts.py."""

    bias: Any
    order: Any
    out: Any
    partial: Any
    arrivals: Any


class Place(NamedTuple):
    """The tile of a program. row, output: its first ones. rows, outputs: of the whole product. base: the weight's row
    for output 0. expert: the index of the expert. first, steps: the first step of this part, and the number of
    steps."""

    row: Any
    rows: Any
    output: Any
    outputs: Any
    base: Any
    expert: Any
    first: Any
    steps: Any
    tile: Any
    part: Any


@gluon.jit
def _fetch_weight(weight, tile, barrier, column, row, up_row, GATED: gl.constexpr):
    """Fetch the weights of one step, for outputs from `row` on. With GATED, each warp group gets the rows of some gates
    and of as many ups; the first up is at up_row."""
    rows: gl.constexpr = weight.block_type.shape[0]
    kinds: gl.constexpr = 2 if GATED else 1
    for group in gl.static_range(tile.shape[0] // rows // kinds):
        mine = tile.slice(group * kinds * rows, kinds * rows, 0)
        tma.async_copy_global_to_shared(weight, [row + group * rows, column], barrier, mine.slice(0, rows, 0))
        if GATED:
            tma.async_copy_global_to_shared(weight, [up_row + group * rows, column], barrier, mine.slice(rows, rows, 0))


@gluon.jit
def _fetch(x, weight, tiles, place, GATED: gl.constexpr):
    """Fetch the tiles of all steps of a program."""
    STAGES: gl.constexpr = tiles.x.shape[0]
    inner: gl.constexpr = x.block_type.shape[1]
    columns: gl.constexpr = weight.block_type.shape[1]
    pieces: gl.constexpr = tiles.weight.shape[1] // weight.block_type.shape[0]
    nbytes: gl.constexpr = x.block_type.nbytes + pieces * weight.block_type.nbytes
    w_row = place.base + place.output
    up_row = w_row + place.outputs
    ahead = gl.minimum(place.steps, STAGES)
    for at in range(ahead):
        mbarrier.expect(tiles.full.index(at), nbytes)
        column = (place.first + at) * columns
        _fetch_weight(weight, tiles.weight.index(at), tiles.full.index(at), column, w_row, up_row, GATED)
    wait_for_inputs(True)
    for at in range(ahead):
        column = (place.first + at) * inner
        tma.async_copy_global_to_shared(x, [place.row, column], tiles.full.index(at), tiles.x.index(at))
    for at in range(ahead, place.steps):
        stage = at % STAGES
        barrier = tiles.full.index(stage)
        mbarrier.wait(tiles.empty.index(stage), (at // STAGES & 1) ^ 1)
        mbarrier.expect(barrier, nbytes)
        column = (place.first + at) * columns
        _fetch_weight(weight, tiles.weight.index(stage), barrier, column, w_row, up_row, GATED)
        column = (place.first + at) * inner
        tma.async_copy_global_to_shared(x, [place.row, column], barrier, tiles.x.index(stage))


@gluon.jit
def outputs_of(inside, GROUP: gl.constexpr, OUTPUTS: gl.constexpr, place, GATED: gl.constexpr):
    """Return an expert's outputs by their indices `inside` the OUTPUTS of a warp group. With GATED the second half of
    the indices are ups. Indices beyond the last output get the last output; their results are not stored."""
    half: gl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    output = gl.minimum(place.output + GROUP * half + inside % half, place.outputs - 1)
    return output + inside // half * place.outputs


@gluon.jit
def _add_parts(acc, results, tile, part):
    """As add_parts in parts.py."""
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = acc.shape[1]
    size: gl.constexpr = acc.shape[0] * rows
    parts = gl.num_programs(1)
    output = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, rows, layout=gl.SliceLayout(0, layout))
    cell = results.partial + (tile * parts).to(gl.int64) * size + output[:, None] * rows + row[None, :]
    gl.store(cell + part * size, acc)
    tl.debug_barrier()
    last = gl.atomic_add(results.arrivals + tile, 1, sem="acq_rel") == parts - 1
    if last:
        # Parts are added up by index, so that the order in which programs finish changes no sum.
        gl.store(results.arrivals + tile, 0)
        acc = gl.zeros([acc.shape[0], rows], gl.float32, layout)
        for each in range(parts):
            acc += gl.load(cell + each * size, cache_modifier=".cg")
    return acc, last


@gluon.jit
def _gated(acc, DTYPE: gl.constexpr, FLAGS: gl.constexpr):
    """Return the gate's activation times up, [outputs, rows], of sums whose first half are gates."""
    half: gl.constexpr = acc.shape[0] // 2
    rows: gl.constexpr = acc.shape[1]
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 0, 1])
    # Rounding both to the output's type first halves the bytes that threads exchange.
    both = acc.to(DTYPE).reshape([2, half, rows]).permute((1, 2, 0))
    gate, up = gl.split(gl.convert_layout(both, pairs))
    GATE: gl.constexpr = FLAGS.gate
    result = gate_of_expert(gate.to(gl.float32), up.to(gl.float32), DTYPE, GATE, FLAGS.alpha, FLAGS.limit)
    return result.to(DTYPE)


@gluon.jit
def _store(acc, results, place, GROUP: gl.constexpr, FLAGS: gl.constexpr):
    """Store the results for a warp group's sums [outputs, rows]."""
    OUTPUTS: gl.constexpr = acc.shape[0]
    half: gl.constexpr = OUTPUTS // 2 if FLAGS.gated else OUTPUTS
    out = results.out
    if FLAGS.bias:
        inside = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, acc.type.layout))
        at = outputs_of(inside, GROUP, OUTPUTS, place, FLAGS.gated)
        experts_outputs = place.expert * (place.outputs * (2 if FLAGS.gated else 1))
        acc += gl.load(results.bias + experts_outputs + at).to(gl.float32)[:, None]
    if FLAGS.gated:
        result = _gated(acc, out.dtype.element_ty, FLAGS)
    else:
        GATE: gl.constexpr = FLAGS.gate
        if GATE != "none":
            acc = activated(acc, out.dtype.element_ty, GATE)
        result = acc.to(out.dtype.element_ty)
    lanes: gl.constexpr = half // 8
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, 4], [0, 1])
    column = place.output + GROUP * half + gl.arange(0, half, layout=gl.SliceLayout(1, layout))
    at_row = place.row + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    here = at_row < place.rows
    if FLAGS.ordered:
        at_row = gl.load(results.order + at_row, mask=here, other=-1)
        here = at_row >= 0
    at = out + at_row.to(gl.int64)[None, :] * place.outputs + column[:, None]
    gl.store(at, gl.convert_layout(result, layout), mask=(column < place.outputs)[:, None] & here[None, :])


@gluon.jit
def _compute(GROUP: gl.constexpr, MULTIPLY: gl.constexpr, operands, tiles, results, place, FLAGS: gl.constexpr):
    """Compute a warp group's outputs of a tile, and store them once all parts are added up."""
    acc = MULTIPLY(GROUP, operands, tiles, place, FLAGS)
    # A part without steps has not yet waited for any input.
    wait_for_inputs(True)
    last = True
    if FLAGS.parted:
        acc, last = _add_parts(acc, results, place.tile * FLAGS.groups + GROUP, place.part)
    if last:
        _store(acc, results, place, GROUP, FLAGS)


# One compiled kernel serves every number of rows.
@gluon.jit(do_not_specialize=["rows", "row_tiles"])
def _hopper_kernel(
    x, weight, operands, bias, order, block_experts, out, partial, arrivals, rows, row_tiles, outputs, inner_steps,
    MULTIPLY: gl.constexpr, FLAGS: gl.constexpr, BLOCK_OUTPUTS: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    BLOCK_ROWS: gl.constexpr = x.block_type.shape[0]
    half: gl.constexpr = BLOCK_OUTPUTS // 2 if FLAGS.gated else BLOCK_OUTPUTS
    let_next_start(True)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_ROWS, x.block_type.shape[1]], x.layout)
    w_tiles = gl.allocate_shared_memory(
        weight.dtype, [STAGES, BLOCK_OUTPUTS, weight.block_type.shape[1]], weight.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=FLAGS.groups)
    fence_async_shared()
    tile, part = gl.program_id(0), gl.program_id(1)
    row_tile, output_tile = tile_of(tile, row_tiles, gl.cdiv(outputs, half))
    each = gl.cdiv(inner_steps, gl.num_programs(1))
    first = part * each
    steps = gl.maximum(gl.minimum(each, inner_steps - first), 0)
    expert = 0
    if FLAGS.experts:
        wait_for_inputs(True)
        expert = gl.load(block_experts + row_tile)
        # Unused blocks compute and store nothing.
        steps = gl.where(expert < 0, 0, steps)
        rows = gl.where(expert < 0, 0, rows)
        expert = gl.maximum(expert, 0)
    base = expert * (outputs * (2 if FLAGS.gated else 1))
    tiles = Tiles(x_tiles, w_tiles, full, empty)
    results = Results(bias, order, out, partial, arrivals)
    place = Place(row_tile * BLOCK_ROWS, rows, output_tile * half, outputs, base, expert, first, steps, tile, part)
    GATED: gl.constexpr = FLAGS.gated
    if FLAGS.groups == 1:
        gl.warp_specialize(
            [
                (_compute, (0, MULTIPLY, operands, tiles, results, place, FLAGS)),
                (_fetch, (x, weight, tiles, place, GATED)),
            ],
            [1],
            [_FETCHING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (0, MULTIPLY, operands, tiles, results, place, FLAGS)),
                (_compute, (1, MULTIPLY, operands, tiles, results, place, FLAGS)),
                (_fetch, (x, weight, tiles, place, GATED)),
            ],
            [4, 1],
            [REGISTERS, _FETCHING_REGISTERS],
        )


_TYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
    torch.int16: gl.int16,
}


def hopper_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    multiply: Any,
    operands: tuple[Any, ...],
    out: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    config: LinearConfig,
    pairs: Pairs | None,
    gate: ExpertGate = "silu",
) -> torch.Tensor:
    """Store the product of rows with a weight in out, [rows, outputs], and return it. All tensors are contiguous.

    x: [rows, inputs]. weight: [outputs, columns], elements or words of several codes. multiply: a Gluon function that
    returns the sums of a warp group, [outputs, rows] float32; it gets the number of the group, the operands, Tiles,
    Place and Flags. gated: the first half of the outputs are gates, and `out` has as many columns. pairs: None = a
    dense layer, with this gate.
    """
    rows, inner = x.shape
    outputs = weight.shape[-2] // (2 if gated else 1)
    half, warp_groups = config.block_outputs // (2 if gated else 1), config.num_warps // 4
    columns = weight.shape[-1]
    block = [config.block_rows, config.block_inner]
    w_block = [half // warp_groups, config.block_inner * columns // inner]
    row_tiles = triton.cdiv(rows, config.block_rows)
    programs = triton.cdiv(outputs, half) * row_tiles
    partial = out
    if config.splits > 1:
        cells = programs * config.splits * config.block_outputs * config.block_rows
        partial = torch.empty(cells, dtype=torch.float32, device=x.device)
    flags = Flags(
        warp_groups, bias is not None, pairs is not None, bool(pairs and pairs.ordered), config.splits > 1,
        *gate_options(pairs.gate if pairs else gate if gated else None).values(),
    )  # fmt: skip
    stage = sum(each[0] * each[1] * tensor.element_size() for each, tensor in ((block, x), (w_block, weight)))
    stage += (config.block_outputs - w_block[0]) * w_block[1] * weight.element_size()
    _hopper_kernel[(programs, config.splits)](
        _described(x, block), _described(weight, w_block), operands, out if bias is None else bias,
        *(pairs.groups if pairs else (out, out)), out, partial, arrivals_of(x.device), rows, row_tiles, outputs,
        triton.cdiv(inner, config.block_inner), MULTIPLY=multiply, FLAGS=flags,
        BLOCK_OUTPUTS=config.block_outputs, STAGES=config.num_stages, num_warps=4, launch_pdl=True,
        **_registers(config, stage),
    )  # fmt: skip
    return out


def _described(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    columns = tensor.shape[-1]
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[tensor.dtype])
    return TensorDescriptor(tensor, [tensor.numel() // columns, columns], [columns, 1], block, layout)


@functools.cache
def _registers(config: LinearConfig, stage: int) -> dict[str, int]:
    """Return the registers of a thread that multiplies, and the launch option that lets as many programs share a
    multiprocessor as fit into its shared memory. stage: bytes of one stage."""
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
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
