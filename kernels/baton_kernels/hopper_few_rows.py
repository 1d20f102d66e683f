"""Products of 1 to 8 rows with weights of 4 bits in groups for Hopper, which are bound by reading the codes.

Each warp loads codes straight into the registers from which the tensor cores take their operands. A load has 16 bytes:
the codes of 32 adjacent columns of one output. The tensor cores may add up the columns in any order, so the inputs take
the order that these loads give. The warps of a program have the same outputs and different columns. A program loads its
first codes before the preceding kernel ends, and those of the next step before it multiplies.
"""

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .activation import gated
from .code_pairs import int4_of, numbers_of
from .kernel_configs import LinearConfig, Product
from .overlap import let_next_start, wait_for_inputs
from .reference.grouped_linear import BLOCK, GroupedWeight

ROWS = 8  # of an instruction of the tensor cores; it takes as long for fewer
_ROWS = gl.constexpr(ROWS)
_BLOCK = gl.constexpr(BLOCK)
_PIECE = gl.constexpr(128)  # columns that four threads have in one load each
REGISTERS, MOST_REGISTERS = 65536, 248  # of a multiprocessor, and of a thread
# Outputs of a program, columns of a step of all its warps, its warps, and the programs that share a multiprocessor.
_TILES = (
    (16, 1024, 4, 5), (16, 2048, 4, 4), (16, 2048, 8, 2), (16, 4096, 8, 2), (16, 4096, 8, 3), (32, 1024, 4, 4),
    (32, 2048, 8, 2),
)  # fmt: skip


class Shape(NamedTuple):
    """The shape of a program's work. outputs: of the program; half: those that are not ups. words: of a warp in a step,
    for each output. even: all words exist."""

    outputs: int
    half: int
    words: int
    warps: int
    even: bool


class _Weight(NamedTuple):
    """The tensors of a GroupedWeight, and compile-time facts: the columns of a group, the kind of the codes, and which
    of "zeros" and "factors" `beside` holds ("" = neither)."""

    codes: Any
    scales: Any
    beside: Any
    size: gl.constexpr
    kind: gl.constexpr
    has: gl.constexpr


@gluon.jit
def w_row_of(inside, outputs, SHAPE: gl.constexpr):
    """Return rows of the weight by their indices inside a program. With gates, the second half of the indices are ups.
    Indices beyond the last output get the last output; their results are not stored. outputs: of the product."""
    HALF: gl.constexpr = SHAPE.half
    return gl.minimum(gl.program_id(0) * HALF + inside % HALF, outputs - 1) + inside // HALF * outputs


@gluon.constexpr_function
def powers_of_two(first, last):
    """Return the powers of two from `first` on that are less than `last`."""
    return [1 << bit for bit in range(first.bit_length() - 1, last.bit_length() - 1)]


@gluon.constexpr_function
def _words_layout(outputs, words, warps):
    """Return the layout of words [warps * outputs, words] of eight codes: 4 adjacent words of a thread are one load."""
    registers = [[0, 1], [0, 2], [8, 0]]
    registers += [[0, bit] for bit in powers_of_two(16, words)] + [[bit, 0] for bit in powers_of_two(16, outputs)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[outputs * bit, 0] for bit in powers_of_two(1, warps)], [], [warps * outputs, words]
    )


@gluon.constexpr_function
def _inputs_layout(columns, warps):
    """Return the layout of inputs [warps * rows, columns] that gives each thread those for its words."""
    registers = [[0, bit] for bit in (*powers_of_two(1, 32), *powers_of_two(128, columns))]
    lanes = [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[8 * bit, 0] for bit in powers_of_two(1, warps)], [], [warps * 8, columns]
    )


@gluon.constexpr_function
def sums_layout(warps):
    """Return the layout of sums [pieces * warps, outputs, rows]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def _scales_sums(kind, size):
    """Whether a scale is for all columns of a piece, so that it multiplies the sum and not each weight."""
    return kind == "int4" and size % _PIECE.value == 0


@gluon.jit
def _in_order(values, WARPS: gl.constexpr):
    """Reorder values [warps * lines, columns] as the tensor cores take them from the registers of the threads that have
    them; return [pieces * warps, lines, _PIECE], the pieces of all warps one after another."""
    lines: gl.constexpr = values.shape[0] // WARPS
    pieces: gl.constexpr = values.shape[1] // _PIECE
    # Each of four threads has a block of 32 columns. An instruction takes two pairs of columns from each.
    values = values.reshape([WARPS, lines, pieces, 4, 16, 2]).permute((2, 0, 1, 4, 3, 5))
    return values.reshape([pieces * WARPS, lines, _PIECE])


@gluon.jit
def _halves(words):
    """Return words [lines, words] of 32 bits as words of 16 bits. A loop that carried the latter from step to step
    would take registers apart and put them together again."""
    both = gl.join(words.to(gl.int16), (words >> 16).to(gl.int16))
    return both.reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def _load_numbers(numbers, w_row, column, columns, SIZE: gl.constexpr, EVEN: gl.constexpr):
    """Return the numbers of groups for rows of the weight and columns, which broadcast; 0 beyond the last column."""
    at = numbers + (w_row * (columns // SIZE) + column // SIZE)
    if EVEN:
        loaded = gl.load(at)
    else:
        loaded = gl.load(at, mask=(column < columns) & (w_row >= 0), other=0)
    return loaded


@gluon.jit
def _load_step(weight, outputs, step, words_of_row, SHAPE: gl.constexpr):
    """Return the words of a step, [warps * outputs, words], the scales of pieces, [pieces * warps, outputs], or else of
    blocks, [warps * outputs, blocks], and the zeros of blocks."""
    WARPS: gl.constexpr = SHAPE.warps
    OUTPUTS: gl.constexpr = SHAPE.outputs
    WORDS: gl.constexpr = SHAPE.words
    lines: gl.constexpr = WARPS * OUTPUTS
    layout: gl.constexpr = _words_layout(OUTPUTS, WORDS, WARPS)
    line = gl.arange(0, lines, layout=gl.SliceLayout(1, layout))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, layout))
    word = ((step * WARPS + line // OUTPUTS) * WORDS)[:, None] + word[None, :]
    at = weight.codes + w_row_of(line % OUTPUTS, outputs, SHAPE).to(gl.int64)[:, None] * words_of_row + word
    if SHAPE.even:
        words = gl.load(at, cache_modifier=".cg")
    else:
        words = gl.load(at, mask=word < words_of_row, other=0, cache_modifier=".cg")
    SIZE: gl.constexpr = weight.size
    KIND: gl.constexpr = weight.kind
    BESIDE: gl.constexpr = weight.has
    blocks: gl.constexpr = WORDS * 8 // _BLOCK
    by_block: gl.constexpr = _halves(words).reshape([lines, blocks, 8]).type.layout
    of_blocks: gl.constexpr = gl.SliceLayout(2, by_block)
    line = gl.arange(0, lines, layout=gl.SliceLayout(1, of_blocks))
    w_row = w_row_of(line % OUTPUTS, outputs, SHAPE)[:, None]
    column = gl.arange(0, blocks, layout=gl.SliceLayout(0, of_blocks)) * _BLOCK
    column = ((step * WARPS + line // OUTPUTS) * (WORDS * 8))[:, None] + column[None, :]
    zero = gl.full([lines, blocks], 0, gl.uint8, of_blocks)
    if BESIDE == "zeros":
        zero = _load_numbers(weight.beside, w_row, column, words_of_row * 8, SIZE, SHAPE.even)
    if _scales_sums(KIND, SIZE):
        of_pieces: gl.constexpr = gl.SliceLayout(2, sums_layout(WARPS))
        pieces: gl.constexpr = WORDS * 8 // _PIECE
        piece = gl.arange(0, pieces * WARPS, layout=gl.SliceLayout(1, of_pieces))
        column = (((step * WARPS + piece % WARPS) * pieces + piece // WARPS) * _PIECE)[:, None]
        w_row = w_row_of(gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, of_pieces)), outputs, SHAPE)[None, :]
    scale = _load_numbers(weight.scales, w_row, column, words_of_row * 8, SIZE, SHAPE.even)
    return words, scale, zero


@gluon.jit
def _products(x, rows, weight, loaded, step, inner, SHAPE: gl.constexpr):
    """Return the products of inputs with the weights of a step, [warps, outputs, rows] float32."""
    words, scale, zero = loaded
    WARPS: gl.constexpr = SHAPE.warps
    SIZE: gl.constexpr = weight.size
    KIND: gl.constexpr = weight.kind
    BESIDE: gl.constexpr = weight.has
    columns: gl.constexpr = words.shape[1] * 8
    pieces: gl.constexpr = columns // _PIECE
    outputs: gl.constexpr = words.shape[0] // WARPS
    layout: gl.constexpr = _inputs_layout(columns, WARPS)
    line = gl.arange(0, WARPS * _ROWS, layout=gl.SliceLayout(1, layout))
    # Rows beyond the last one are read as the last one. Their results are not stored.
    row = gl.minimum(gl.program_id(1) * _ROWS + line % _ROWS, rows - 1)
    column = gl.arange(0, columns, layout=gl.SliceLayout(0, layout))
    column = ((step * WARPS + line // _ROWS) * columns)[:, None] + column[None, :]
    at = x + row[:, None] * inner + column
    if SHAPE.even:
        inputs = gl.load(at)
    else:
        inputs = gl.load(at, mask=column < inner, other=0.0)
    words = _halves(words)
    if _scales_sums(KIND, SIZE):
        numbers = int4_of(words, zero, inputs.dtype, BESIDE)
    else:
        numbers = numbers_of(words, scale, zero, inputs.dtype, KIND, BESIDE)
    sums: gl.constexpr = sums_layout(WARPS)
    # Each thread already has the elements of these layouts, so nothing moves.
    numbers = gl.convert_layout(_in_order(numbers, WARPS), gl.DotOperandLayout(0, sums, 2), assert_trivial=True)
    inputs = _in_order(inputs, WARPS).permute((0, 2, 1))
    inputs = gl.convert_layout(inputs, gl.DotOperandLayout(1, sums, 2), assert_trivial=True)
    acc = mma_v2(numbers, inputs, gl.zeros([pieces * WARPS, outputs, _ROWS], gl.float32, sums))
    if _scales_sums(KIND, SIZE):
        acc *= scale.to(gl.float32)[:, :, None]
    acc = gl.sum(acc.reshape([pieces, WARPS, outputs, _ROWS]), axis=0)
    return gl.convert_layout(acc, sums, assert_trivial=True)


@gluon.jit
def store_sums(
    acc, bias, factors, out, rows, outputs, SHAPE: gl.constexpr,
    BIAS: gl.constexpr, FACTORS: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Add up the sums of a program's warps, [warps, outputs, rows], and store the results. FACTORS: those of outputs
    are multiplied by 256 times their factor."""
    WARPS: gl.constexpr = SHAPE.warps
    OUTPUTS: gl.constexpr = SHAPE.outputs
    half: gl.constexpr = SHAPE.half
    acc = gl.sum(acc, axis=0)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
    acc = gl.convert_layout(acc, layout)
    w_row = w_row_of(gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout)), outputs, SHAPE)
    if FACTORS:
        acc *= (gl.load(factors + w_row) * 256.0)[:, None]
    if BIAS:
        acc += gl.load(bias + w_row).to(gl.float32)[:, None]
    if half < OUTPUTS:
        pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [1, WARPS, 1], [2, 0, 1])
        gate, up = gl.split(gl.convert_layout(acc.reshape([2, half, _ROWS]).permute((1, 2, 0)), pairs))
        acc = gl.convert_layout(gated(gate, up, out.dtype.element_ty, GELU), layout)
    output = gl.program_id(0) * half + gl.arange(0, half, layout=gl.SliceLayout(1, layout))
    at_row = gl.program_id(1) * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(0, layout))
    at = out + at_row.to(gl.int64)[None, :] * outputs + output[:, None]
    gl.store(at, acc.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & (at_row < rows)[None, :])


# One compiled kernel serves every number of rows.
@gluon.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x, weight, bias, out, rows, outputs, words_of_row, steps, SHAPE: gl.constexpr, BIAS: gl.constexpr
):  # fmt: skip
    let_next_start(True)
    WARPS: gl.constexpr = SHAPE.warps
    OUTPUTS: gl.constexpr = SHAPE.outputs
    BESIDE: gl.constexpr = weight.has
    # Programs begin at different steps, since they would otherwise wait for the same inputs at the same time.
    step = gl.program_id(0) % steps
    loaded = _load_step(weight, outputs, step, words_of_row, SHAPE)
    wait_for_inputs(True)
    inner = words_of_row * 8
    acc = gl.zeros([WARPS, OUTPUTS, _ROWS], gl.float32, sums_layout(WARPS))
    for _ in range(steps - 1):
        next_step = (step + 1) % steps
        following = _load_step(weight, outputs, next_step, words_of_row, SHAPE)
        acc += _products(x, rows, weight, loaded, step, inner, SHAPE)
        loaded, step = following, next_step
    acc += _products(x, rows, weight, loaded, step, inner, SHAPE)
    store_sums(acc, bias, weight.beside, out, rows, outputs, SHAPE, BIAS, BESIDE == "factors", False)


def few_rows_candidates(rows: int, product: Product) -> list[LinearConfig]:
    """Return the configurations to measure for a product of `rows` rows with a weight that has_hopper_kernel."""
    if rows > ROWS:
        return []
    # A step of more columns than there are would leave some warps idle.
    return [LinearConfig(1, *tile[:2], 1, *tile[2:], hopper=True) for tile in _TILES if tile[1] <= product.inner]


def few_rows_codes(
    x: torch.Tensor,
    weight: GroupedWeight,
    bias: torch.Tensor | None,
    gated: bool,
    config: LinearConfig,
    out: torch.Tensor,
) -> torch.Tensor:
    """Compute grouped_linear_reference, x: [rows, inputs], where has_hopper_kernel. All tensors are contiguous."""
    rows, inner = x.shape
    has, beside = weight.beside
    facts = (gl.constexpr(each) for each in (inner // weight.scales.shape[-1], weight.kind, has))
    half = config.block_outputs // (2 if gated else 1)
    outputs, words = out.shape[-1], config.block_inner // 8 // config.num_warps
    # With fewer registers than it could have, the assembler would load codes later.
    registers = REGISTERS // (32 * config.num_warps * config.num_stages)
    shape = Shape(config.block_outputs, half, words, config.num_warps, inner % config.block_inner == 0)
    _few_rows_kernel[(triton.cdiv(outputs, half), triton.cdiv(rows, ROWS))](
        x, _Weight(weight.codes.view(torch.int32), weight.scales, beside, *facts), out if bias is None else bias, out,
        rows, outputs, inner // 8, triton.cdiv(inner, config.block_inner), SHAPE=shape, BIAS=bias is not None,
        num_warps=config.num_warps, maxnreg=min(registers // 8 * 8, MOST_REGISTERS), launch_pdl=True,
    )  # fmt: skip
    return out
