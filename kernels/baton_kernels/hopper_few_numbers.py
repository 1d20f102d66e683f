"""Products of 2 to 8 rows with weights of 16 bits for Hopper, which are bound by reading the weights.

Like hopper_few_rows.py, with numbers in place of codes: a load has 16 bytes, which are 8 adjacent columns of one
output. The warps of a program have all columns of its outputs among them, so no sum is cut into parts for which
programs would wait.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .hopper_few_rows import MOST_REGISTERS, REGISTERS, ROWS, Shape, powers_of_two, store_sums, sums_layout, w_row_of
from .kernel_configs import LinearConfig, Product
from .overlap import LINE, let_next_start, lines_ahead, prefetch, wait_for_inputs

_ROWS = gl.constexpr(ROWS)
# With the weights of an 8B model, a decode step was slower than with the tiles in linear.py, although the products
# alone were as fast. So the kernel is used for weights of at most this many elements, as those of a 0.6B model have.
_MOST_ELEMENTS = 12 << 20
# Outputs of a program, columns of a step of all its warps, its warps, and the programs that share a multiprocessor.
_TILES = (
    (16, 256, 4, 6), (16, 512, 4, 4), (16, 1024, 4, 2), (16, 512, 8, 3), (16, 1024, 8, 2), (16, 2048, 8, 1),
    (16, 2048, 16, 1), (32, 512, 4, 2), (32, 512, 8, 2), (32, 1024, 8, 1),
)  # fmt: skip


@gluon.constexpr_function
def _numbers_layout(lines, columns, warps):
    """Return the layout of numbers [warps * lines, columns]: 8 adjacent columns of a thread are one load."""
    registers = [[0, 1], [0, 2], [0, 4]]
    registers += [[0, bit] for bit in powers_of_two(32, columns)] + [[bit, 0] for bit in powers_of_two(8, lines)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[lines * bit, 0] for bit in powers_of_two(1, warps)], [], [warps * lines, columns]
    )


@gluon.jit
def _in_order(values, WARPS: gl.constexpr):
    """Reorder values [warps * lines, columns] as the tensor cores take them from the registers of the threads that have
    them; return [warps, lines, columns]."""
    lines: gl.constexpr = values.shape[0] // WARPS
    columns: gl.constexpr = values.shape[1]
    # Each of four threads has four pairs of 32 columns. An instruction takes two of them.
    values = values.reshape([WARPS, lines, columns // 32, 4, 4, 2]).permute((0, 1, 2, 4, 3, 5))
    return values.reshape([WARPS, lines, columns])


@gluon.jit
def _load(rows_at, row, step, inner, LINES: gl.constexpr, SHAPE: gl.constexpr):
    """Return a step's columns of rows, [warps * LINES, columns]. row: of each line."""
    WARPS: gl.constexpr = SHAPE.warps
    columns: gl.constexpr = SHAPE.words
    layout: gl.constexpr = _numbers_layout(LINES, columns, WARPS)
    line = gl.arange(0, WARPS * LINES, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, columns, layout=gl.SliceLayout(0, layout))
    column = ((step * WARPS + line // LINES) * columns)[:, None] + column[None, :]
    at = rows_at + row.to(gl.int64)[:, None] * inner + column
    if SHAPE.even:
        loaded = gl.load(at)
    else:
        loaded = gl.load(at, mask=column < inner, other=0.0)
    return loaded


@gluon.jit
def _load_weights(weight, outputs, step, inner, SHAPE: gl.constexpr):
    OUTPUTS: gl.constexpr = SHAPE.outputs
    layout: gl.constexpr = _numbers_layout(OUTPUTS, SHAPE.words, SHAPE.warps)
    line = gl.arange(0, SHAPE.warps * OUTPUTS, layout=gl.SliceLayout(1, layout))
    return _load(weight, w_row_of(line % OUTPUTS, outputs, SHAPE), step, inner, OUTPUTS, SHAPE)


@gluon.jit
def _load_inputs(x, rows, step, inner, SHAPE: gl.constexpr):
    layout: gl.constexpr = _numbers_layout(_ROWS, SHAPE.words, SHAPE.warps)
    line = gl.arange(0, SHAPE.warps * _ROWS, layout=gl.SliceLayout(1, layout))
    # Rows beyond the last one are read as the last one. Their results are not stored.
    row = gl.minimum(gl.program_id(1) * _ROWS + line % _ROWS, rows - 1)
    return _load(x, row, step, inner, _ROWS, SHAPE)


@gluon.jit
def _add_products(acc, inputs, weights, WARPS: gl.constexpr):
    """Add the products of inputs with the weights of a step to sums [warps, outputs, rows]."""
    sums: gl.constexpr = sums_layout(WARPS)
    # Each thread already has the elements of these layouts, so nothing moves.
    inputs = _in_order(inputs, WARPS).permute((0, 2, 1))
    inputs = gl.convert_layout(inputs, gl.DotOperandLayout(1, sums, 2), assert_trivial=True)
    weights = gl.convert_layout(_in_order(weights, WARPS), gl.DotOperandLayout(0, sums, 2), assert_trivial=True)
    return mma_v2(weights, inputs, acc)


# One compiled kernel serves every number of rows.
@gluon.jit(do_not_specialize=["rows"])
def _few_numbers_kernel(
    x, weight, bias, out, rows, outputs, inner, steps,
    SHAPE: gl.constexpr, BIAS: gl.constexpr, GELU: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    let_next_start(True)
    WARPS: gl.constexpr = SHAPE.warps
    OUTPUTS: gl.constexpr = SHAPE.outputs
    # Programs begin at different steps, since they would otherwise wait for the same inputs at the same time.
    step = gl.program_id(0) % steps
    weights = _load_weights(weight, outputs, step, inner, SHAPE)
    if AHEAD > 0:
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
        elements: gl.constexpr = LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
        line = w_row_of(gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout)), outputs, SHAPE)
        column = gl.arange(0, AHEAD, layout=gl.SliceLayout(0, layout)) * elements
        column = ((step + 1) * (WARPS * SHAPE.words) + column) % inner
        prefetch(weight + line.to(gl.int64)[:, None] * inner + column[None, :])
    wait_for_inputs(True)
    acc = gl.zeros([WARPS, OUTPUTS, _ROWS], gl.float32, sums_layout(WARPS))
    inputs = _load_inputs(x, rows, step, inner, SHAPE)
    for _ in range(steps - 1):
        step = (step + 1) % steps
        next_weights = _load_weights(weight, outputs, step, inner, SHAPE)
        next_inputs = _load_inputs(x, rows, step, inner, SHAPE)
        acc = _add_products(acc, inputs, weights, WARPS)
        weights, inputs = next_weights, next_inputs
    acc = _add_products(acc, inputs, weights, WARPS)
    store_sums(acc, bias, bias, out, rows, outputs, SHAPE, BIAS, False, GELU)


def few_numbers_candidates(rows: int, product: Product) -> list[LinearConfig]:
    """Return the configurations to measure for a product of `rows` rows on Hopper."""
    if not 1 < rows <= ROWS or product.outputs * product.inner > _MOST_ELEMENTS:
        return []
    # A step of more columns than there are would leave some warps idle.
    return [LinearConfig(ROWS, *tile[:2], 1, *tile[2:], hopper=True) for tile in _TILES if tile[1] <= product.inner]


def few_numbers(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: str | None,
    config: LinearConfig,
    out: torch.Tensor,
) -> torch.Tensor:
    """Compute linear_reference on Hopper. All tensors are contiguous, of 16 bits and of one dtype. x: [rows, inner],
    where inner is a multiple of 8."""
    rows, inner = x.shape
    half = config.block_outputs // (2 if gate else 1)
    columns = config.block_inner // config.num_warps
    steps = triton.cdiv(inner, config.block_inner)
    rest = max(inner - config.block_inner, 0) * weight.element_size()
    ahead = lines_ahead(len(weight), rest, False, config, x.device)
    registers = REGISTERS // (32 * config.num_warps * config.num_stages)
    shape = Shape(config.block_outputs, half, columns, config.num_warps, inner % config.block_inner == 0)
    _few_numbers_kernel[(triton.cdiv(out.shape[-1], half), triton.cdiv(rows, ROWS))](
        x, weight, out if bias is None else bias, out, rows, out.shape[-1], inner, steps, SHAPE=shape,
        BIAS=bias is not None, GELU=gate == "gelu_tanh", AHEAD=ahead, num_warps=config.num_warps,
        maxnreg=min(registers // 8 * 8, MOST_REGISTERS), launch_pdl=True,
    )  # fmt: skip
    return out
