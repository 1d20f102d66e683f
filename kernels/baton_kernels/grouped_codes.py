"""Weights of 4 or 8 bits in groups as kernels read them: a unit is a piece of a row whose columns share a scale."""

from typing import Any

import torch
import triton
import triton.language as tl

from .overlap import overlap_options
from .reference.grouped_linear import FOUR_BITS, GroupedWeight

# The most columns of a unit.
_UNIT = 128
# Triton multiplies matrices with at least so many columns.
_LEAST_WORDS = 16

# Two words of four int4 codes ($4) become four pairs of numbers ($0 to $3). The bits of a code become the lowest ones
# of a bfloat16 whose other bits make it 128 + code; from that 128 + zero ($5) is subtracted, which is exact.
_INT4_PAIRS = tl.constexpr("""{
    .reg .b32 t;
    lop3.b32 t, $4, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 $0, t, $5;
    shr.u32 t, $4, 4;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 $1, t, $5;
    shr.u32 t, $4, 8;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 $2, t, $5;
    shr.u32 t, $4, 12;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 $3, t, $5;
}""")
# The same, and each number is multiplied with its scale ($6).
_INT4_SCALED_PAIRS = tl.constexpr("""{
    .reg .b32 t;
    lop3.b32 t, $4, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 t, t, $5;
    mul.bf16x2 $0, t, $6;
    shr.u32 t, $4, 4;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 t, t, $5;
    mul.bf16x2 $1, t, $6;
    shr.u32 t, $4, 8;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 t, t, $5;
    mul.bf16x2 $2, t, $6;
    shr.u32 t, $4, 12;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    sub.bf16x2 t, t, $5;
    mul.bf16x2 $3, t, $6;
}""")
# The same for e2m1 codes. The sign and the three other bits of a code become those of a bfloat16 that is 2 ** -126
# times the number, which is multiplied with 2 ** 126 times its scale ($5).
_E2M1_PAIRS = tl.constexpr("""{
    .reg .b32 t, u;
    shl.b32 t, $4, 6;
    and.b32 t, t, 0x01c001c0;
    shl.b32 u, $4, 12;
    lop3.b32 t, u, 0x80008000, t, 0xea;
    mul.bf16x2 $0, t, $5;
    shl.b32 t, $4, 2;
    and.b32 t, t, 0x01c001c0;
    shl.b32 u, $4, 8;
    lop3.b32 t, u, 0x80008000, t, 0xea;
    mul.bf16x2 $1, t, $5;
    shr.u32 t, $4, 2;
    and.b32 t, t, 0x01c001c0;
    shl.b32 u, $4, 4;
    lop3.b32 t, u, 0x80008000, t, 0xea;
    mul.bf16x2 $2, t, $5;
    shr.u32 t, $4, 6;
    and.b32 t, t, 0x01c001c0;
    lop3.b32 t, $4, 0x80008000, t, 0xea;
    mul.bf16x2 $3, t, $5;
}""")


@triton.jit
def _values(codes, zero, table, KIND: tl.constexpr):
    """Return the values of codes, int32, in float32. zero: the codes of 0, which broadcast to codes."""
    if KIND == "fp8":
        values = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == "e2m1":
        # The bits of a float16 that is 2 ** -14 times the value: its exponent has a bias of 15 instead of 1.
        bits = ((codes & 8) << 12) | ((codes & 7) << 9)
        values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif KIND == "table":
        values = tl.load(table + codes)
    else:
        # The bits of 2 ** 23 + code in float32: conversions of integers take several times as long as other operations.
        values = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    return values


@triton.jit
def _load_scales(pointers, known, FAST: tl.constexpr):
    """Load scales, as float32. FAST: exponents, of at most 128, become 2 ** 126 times the scale."""
    if pointers.dtype.element_ty == tl.uint8 and FAST:
        scale = ((tl.load(pointers, mask=known, other=0).to(tl.int32) + 126) << 23).to(tl.float32, bitcast=True)
    elif pointers.dtype.element_ty == tl.uint8:
        exponents = tl.load(pointers, mask=known, other=0).to(tl.int32)
        bits = tl.where(exponents == 0, 1 << 22, exponents << 23)
        bits = tl.where(exponents == 255, 0x7FC00000, bits)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(pointers, mask=known, other=0.0).to(tl.float32)
    return scale


@triton.jit
def load_scales(
    scales, zeros, w_row, first, units, groups, UNITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    FOUR: tl.constexpr, ZEROS: tl.constexpr, SUMS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return the scales of UNITS units from the first on, and the codes of their zeros, in float32.

    They are [outputs, units], or with SUMS, where all units are within one group, [outputs]. FAST: as in _load_scales.
    """
    if SUMS:
        group = w_row * groups + first * UNIT // GROUP
        known = (w_row >= 0) & (first < units)
    else:
        unit = first + tl.arange(0, UNITS)
        group = w_row[:, None] * groups + (unit * UNIT // GROUP)[None, :]
        known = (w_row >= 0)[:, None] & (unit < units)[None, :]
    scale = _load_scales(scales + group, known, FAST)
    zero = tl.zeros_like(scale) + (8.0 if FOUR else 128.0)
    if ZEROS:
        zero = tl.load(zeros + group, mask=known, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def load_codes(codes, w_row, first, units, code_columns, UNITS: tl.constexpr, UNIT: tl.constexpr, FOUR: tl.constexpr):
    """Return the words of UNITS units, [outputs, units, words of a unit]. A word has four codes of 4 bits, or one of
    8."""
    size: tl.constexpr = UNIT // 4 if FOUR else UNIT
    unit = first + tl.arange(0, UNITS)
    word = unit[:, None] * size + tl.arange(0, size)[None, :]
    at = codes + w_row[:, None, None] * code_columns + word[None, :, :]
    return tl.load(at, mask=(unit < units)[None, :, None], other=0)


@triton.jit
def columns_of(first, UNITS: tl.constexpr, UNIT: tl.constexpr, FOUR: tl.constexpr):
    """Return the column of each word's first code, [units, words of a unit]; its other codes are 8 columns apart."""
    if FOUR:
        word = tl.arange(0, UNIT // 4)
        inside = word // 8 * 32 + word % 8
    else:
        inside = tl.arange(0, UNIT)
    return (first + tl.arange(0, UNITS))[:, None] * UNIT + inside[None, :]


@triton.jit
def load_inputs(x_row, here, first, units, UNITS: tl.constexpr, UNIT: tl.constexpr, FOUR: tl.constexpr):
    """Return four tiles [words, rows] of inputs: those that the first codes of UNITS units' words multiply, those of
    the second ones, and so on. Where words have one code, all are the first tile.

    x_row: pointers to the first input of each row, [1, rows]. here: whether a row exists, likewise.
    """
    column = columns_of(first, UNITS, UNIT, FOUR).reshape(UNITS * (UNIT // 4 if FOUR else UNIT))
    column = tl.max_contiguous(tl.multiple_of(column, 8), 8)[:, None]
    known = (column < units * UNIT) & here
    one = tl.load(x_row + column, mask=known, other=0.0)
    two, three, four = one, one, one
    if FOUR:
        two = tl.load(x_row + column + 8, mask=known, other=0.0)
        three = tl.load(x_row + column + 16, mask=known, other=0.0)
        four = tl.load(x_row + column + 24, mask=known, other=0.0)
    return one, two, three, four


@triton.jit
def decode(words, scale, zero, table, KIND: tl.constexpr, FOUR: tl.constexpr):
    """Return the numbers of the four codes of words, in float32, without their scales. scale and zero broadcast to
    words."""
    codes = words.to(tl.int32)
    if FOUR:
        one, two = _values(codes & 15, zero, table, KIND), _values((codes >> 4) & 15, zero, table, KIND)
        three, four = _values((codes >> 8) & 15, zero, table, KIND), _values((codes >> 12) & 15, zero, table, KIND)
    else:
        one = _values(codes & 255, zero, table, KIND)
        two, three, four = one, one, one
    return one, two, three, four


@triton.jit
def _decode_pairs(words, scale, zero, KIND: tl.constexpr, SUMS: tl.constexpr):
    """Return the numbers of the four codes of words in bfloat16, times the scale unless SUMS, by instructions that work
    on two of them at once. They have the bits that `decode` leads to."""
    if KIND == "e2m1":
        one, two, three, four = tl.inline_asm_elementwise(
            _E2M1_PAIRS, "=r,=r,=r,=r,r,r", [words, scale.to(tl.bfloat16).broadcast_to(words.shape)],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif SUMS:
        one, two, three, four = tl.inline_asm_elementwise(
            _INT4_PAIRS, "=r,=r,=r,=r,r,r", [words, (zero + 128.0).to(tl.bfloat16).broadcast_to(words.shape)],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        one, two, three, four = tl.inline_asm_elementwise(
            _INT4_SCALED_PAIRS, "=r,=r,=r,=r,r,r,r",
            [words, (zero + 128.0).to(tl.bfloat16).broadcast_to(words.shape),
             scale.to(tl.bfloat16).broadcast_to(words.shape)],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return one, two, three, four


@triton.jit
def add_units(
    acc, one, two, three, four, codes, scales, zeros, table, w_row, first, units, code_columns, groups,
    UNITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr,
    ZEROS: tl.constexpr, SUMS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return acc [outputs, rows] and the product with UNITS units of the weights.

    one, two, three, four: as load_inputs returns them. SUMS: sums are multiplied with the scale, not weights. FAST: as
    in grouped_operands.
    """
    scale, zero = load_scales(scales, zeros, w_row, first, units, groups, UNITS, UNIT, GROUP, FOUR, ZEROS, SUMS, FAST)
    words = load_codes(codes, w_row, first, units, code_columns, UNITS, UNIT, FOUR)
    outputs: tl.constexpr = words.shape[0]
    inner: tl.constexpr = words.shape[1] * words.shape[2]
    w_scale = scale[:, None, None] if SUMS else scale[:, :, None]
    w_zero = zero[:, None, None] if SUMS else zero[:, :, None]
    if FAST:
        w1, w2, w3, w4 = _decode_pairs(words, w_scale, w_zero, KIND, SUMS)
    else:
        w1, w2, w3, w4 = decode(words, w_scale, w_zero, table, KIND, FOUR)
        if not SUMS:
            w1, w2, w3, w4 = w1 * w_scale, w2 * w_scale, w3 * w_scale, w4 * w_scale
    part = acc
    if SUMS:
        part = tl.zeros_like(acc)
    part = tl.dot(w1.to(one.dtype).reshape(outputs, inner), one, part, input_precision="ieee")
    if FOUR:
        part = tl.dot(w2.to(one.dtype).reshape(outputs, inner), two, part, input_precision="ieee")
        part = tl.dot(w3.to(one.dtype).reshape(outputs, inner), three, part, input_precision="ieee")
        part = tl.dot(w4.to(one.dtype).reshape(outputs, inner), four, part, input_precision="ieee")
    if SUMS:
        part = acc + part * scale[:, None]
    return part


def grouped_operands(
    weight: GroupedWeight, block_inner: int, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Return what all kernels take of a weight, or of a stack of weights: tensors, sizes (units, words of a row,
    groups), and flags.

    block_inner: columns of a step. dtype: of the inputs. FAST: pairs of codes become bfloat16 at once, on a GPU.
    """
    codes, scales = weight.codes, weight.scales
    group = weight.inputs // scales.shape[-1]
    unit = min(group & -group, _UNIT)
    fast = codes.is_cuda and dtype == torch.bfloat16
    fast &= weight.kind == "int4" or (weight.kind == "e2m1" and scales.dtype == torch.uint8)
    units = max(block_inner // unit, 1)
    # Scales that bfloat16 has not are multiplied with sums, or in float32 where the words of a group are too few for a
    # product of matrices.
    if fast and weight.kind == "int4" and scales.dtype != torch.bfloat16 and group % (units * unit):
        fast = unit // 4 >= _LEAST_WORDS
        units = 1 if fast else units
    tensors = (codes, scales, codes if weight.zeros is None else weight.zeros,
               codes if weight.table is None else weight.table)  # fmt: skip
    flags = {
        "UNITS": units, "UNIT": unit, "GROUP": group, "KIND": weight.kind, "FOUR": weight.kind in FOUR_BITS,
        "ZEROS": weight.zeros is not None, "FAST": fast,
        "SUMS": weight.kind == "int4" and group % (units * unit) == 0,
        **overlap_options(codes.device),
    }  # fmt: skip
    return tensors, (weight.inputs // unit, codes.shape[-1], scales.shape[-1]), flags
