"""How kernels read weights of 4 or 8 bits in groups. A unit is a run of columns of one row that share a scale."""

from typing import Any

import torch
import triton
import triton.language as tl

from .overlap import overlap_options
from .reference.grouped_linear import FOUR_BITS, GroupedWeight

# The most columns of a unit: 16 words of four codes, as many as the tensor cores multiply at a time.
_UNIT = 64


@triton.jit
def _values(codes, zero, table, KIND: tl.constexpr):
    """Return the values of int32 codes in float32. zero: the codes that stand for 0, which broadcast to codes."""
    if KIND == "fp8":
        values = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == "e2m1":
        # These are the bits of a float16 that is 2 ** -14 times the value, because its exponent bias is 15 instead of
        # 1.
        bits = ((codes & 8) << 12) | ((codes & 7) << 9)
        values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif KIND == "table":
        values = tl.load(table + codes)
    else:
        # These are the bits of 2 ** 23 + code in float32. Converting an integer would take several times as long.
        values = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    return values


@triton.jit
def _load_scales(pointers, known):
    """Load scales, as float32."""
    if pointers.dtype.element_ty == tl.uint8:
        exponents = tl.load(pointers, mask=known, other=0).to(tl.int32)
        bits = tl.where(exponents == 0, 1 << 22, exponents << 23)
        bits = tl.where(exponents == 255, 0x7FC00000, bits)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(pointers, mask=known, other=0.0).to(tl.float32)
    return scale


@triton.jit
def _half_scale(bits, factor):
    """Return a factor times a float8_e4m3fn above 0, of which bits, int32, has the lowest 8."""
    # The bits of a float32 that is 2 ** -120 times the number: its exponent has a bias of 127 instead of 7.
    return ((bits & 255) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36 * factor


@triton.jit
def load_scales(
    scales, beside, w_row, first, units, groups, UNITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    FOUR: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Return the scales and the zeros of UNITS units from the unit `first` on, [outputs, units] float32 each.

    beside: the zeros of groups if BESIDE is "zeros". If it is "factors", those of outputs; this function then returns
    the scales of the first and of the second halves of units.
    """
    unit = first + tl.arange(0, UNITS)
    group = w_row[:, None] * groups + (unit * UNIT // GROUP)[None, :]
    known = (w_row >= 0)[:, None] & (unit < units)[None, :]
    if BESIDE == "factors":
        factor = tl.load(beside + w_row, mask=w_row >= 0, other=0.0)[:, None]
        both = tl.load(scales + group, mask=known, other=0).to(tl.int32)
        scale, zero = _half_scale(both, factor), _half_scale(both >> 8, factor)
    else:
        scale = _load_scales(scales + group, known)
        zero = tl.zeros_like(scale) + (8.0 if FOUR else 128.0)
        if BESIDE == "zeros":
            zero = tl.load(beside + group, mask=known, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def load_codes(
    codes, w_row, first, units, code_columns, UNITS: tl.constexpr, UNIT: tl.constexpr, FOUR: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Return the words of UNITS units, [outputs, words]. A word has four codes of 4 bits, or one of 8. EVEN: all units
    exist."""
    size: tl.constexpr = UNIT // 4 if FOUR else UNIT
    word = first * size + tl.arange(0, UNITS * size)
    at = codes + w_row[:, None] * code_columns + word[None, :]
    if EVEN:
        words = tl.load(at)
    else:
        words = tl.load(at, mask=(word < units * size)[None, :], other=0)
    return words


@triton.jit
def columns_of(first, UNITS: tl.constexpr, UNIT: tl.constexpr, FOUR: tl.constexpr):
    """Return the column of each word's first code, [units, words of a unit]; its other codes are 8 columns apart."""
    if FOUR:
        word = tl.arange(0, UNIT // 4)
        inside = word // 8 * 32 + word % 8
    else:
        inside = tl.arange(0, UNIT)
    return (first + tl.arange(0, UNITS))[:, None] * UNIT + inside[None, :]


@triton.constexpr_function
def _units_together(units, unit):
    """Return how many units share one order of columns: enough for 16 words, if UNITS allows it."""
    return 2 if unit == 32 and units % 2 == 0 else 1


@triton.jit
def _load_inputs(
    x_row, here, first, units, UNITS: tl.constexpr, UNIT: tl.constexpr, FOUR: tl.constexpr, EVEN: tl.constexpr
):
    """Return the inputs of UNITS units' columns, [columns, rows], in the order in which _add_units has the weights.

    x_row: pointers to the first input of each row, [1, rows]. here: whether a row exists, likewise. EVEN: all units
    exist.
    """
    at = tl.arange(0, UNITS * UNIT)
    if FOUR:
        # The inputs for the first codes of a unit's words come first, then those for the second codes, and so on.
        together: tl.constexpr = _units_together(UNITS, UNIT) * UNIT
        word = at % (together // 4)
        at = at // together * together + word // 8 * 32 + at % together // (together // 4) * 8 + word % 8
    column = tl.max_contiguous(tl.multiple_of(first * UNIT + at, 8), 8)[:, None]
    if EVEN:
        values = tl.load(x_row + column, mask=here, other=0.0)
    else:
        values = tl.load(x_row + column, mask=(column < units * UNIT) & here, other=0.0)
    return values


@triton.jit
def decode(words, zero, table, KIND: tl.constexpr, FOUR: tl.constexpr):
    """Return the values of the four codes of words, in float32, without their scales. zero broadcasts to words."""
    codes = words.to(tl.int32)
    if FOUR:
        one, two = _values(codes & 15, zero, table, KIND), _values((codes >> 4) & 15, zero, table, KIND)
        three, four = _values((codes >> 8) & 15, zero, table, KIND), _values((codes >> 12) & 15, zero, table, KIND)
    else:
        one = _values(codes & 255, zero, table, KIND)
        two, three, four = one, one, one
    return one, two, three, four


@triton.jit
def _numbers(
    words, scale, zero, table, DTYPE: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Return the values of words [outputs, words], times their scales [outputs, units], in DTYPE. scale, zero: as
    load_scales returns them.

    Their shape is [outputs, blocks, units of a block, words of a unit]. With FOUR, [2, 2] follows: the codes of a word.
    """
    outputs: tl.constexpr = scale.shape[0]
    units: tl.constexpr = scale.shape[1]
    size: tl.constexpr = words.shape[1] // units
    together: tl.constexpr = _units_together(units, size * 4) if FOUR else 1
    words = words.reshape(outputs, units // together, together, size)
    scale = scale.reshape(outputs, units // together, together)[:, :, :, None]
    zero = zero.reshape(outputs, units // together, together)[:, :, :, None]
    one, two, three, four = decode(words, zero, table, KIND, FOUR)
    second = zero if BESIDE == "factors" else scale
    one, two, three, four = one * scale, two * scale, three * second, four * second
    numbers = one
    if FOUR:
        numbers = tl.join(tl.join(one, three), tl.join(two, four))
    return numbers.to(DTYPE)


@triton.jit
def _add_units(
    acc, values, words, scale, zero, table, KIND: tl.constexpr, FOUR: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Return acc [outputs, rows] plus the product of inputs with units of the weights.

    values, words, scale, zero: as _load_inputs, load_codes and load_scales return them.
    """
    weights = _numbers(words, scale, zero, table, values.dtype, KIND, FOUR, BESIDE)
    if FOUR:
        # Codes of a word before words, so that what a thread decodes is what the tensor cores take from its registers.
        weights = weights.permute(0, 1, 4, 5, 2, 3)
    # The product itself adds to acc, so that the next weights are decoded while these are multiplied.
    return tl.dot(weights.reshape(acc.shape[0], values.shape[0]), values, acc, input_precision="ieee")


@triton.jit
def multiply(
    x_row, here, codes, scales, beside, table, w_row, up_row, first, steps, units, code_columns, groups,
    UNITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr,
    BESIDE: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return the products of inputs with rows w_row of the weight over the units from `first` on, and with GATED also
    those with rows up_row, [outputs, rows] float32 each.

    x_row, here: as in _load_inputs. w_row, up_row: [outputs]. steps: the number of steps of UNITS units each. EVEN: all
    these units exist.
    """
    acc = tl.zeros([w_row.shape[0], here.shape[1]], tl.float32)
    acc_up = tl.zeros([w_row.shape[0], here.shape[1]], tl.float32)
    # Scales are too small for asynchronous copies, so they are loaded one step early.
    scale, zero = load_scales(scales, beside, w_row, first, units, groups, UNITS, UNIT, GROUP, FOUR, BESIDE)
    up_scale, up_zero = scale, zero
    if GATED:
        up_scale, up_zero = load_scales(scales, beside, up_row, first, units, groups, UNITS, UNIT, GROUP, FOUR, BESIDE)
    for step in range(0, steps):
        at = first + step * UNITS
        next_scale, next_zero = load_scales(
            scales, beside, w_row, at + UNITS, units, groups, UNITS, UNIT, GROUP, FOUR, BESIDE
        )
        values = _load_inputs(x_row, here, at, units, UNITS, UNIT, FOUR, EVEN)
        words = load_codes(codes, w_row, at, units, code_columns, UNITS, UNIT, FOUR, EVEN)
        acc = _add_units(acc, values, words, scale, zero, table, KIND, FOUR, BESIDE)
        scale, zero = next_scale, next_zero
        if GATED:
            next_scale, next_zero = load_scales(
                scales, beside, up_row, at + UNITS, units, groups, UNITS, UNIT, GROUP, FOUR, BESIDE
            )
            words = load_codes(codes, up_row, at, units, code_columns, UNITS, UNIT, FOUR, EVEN)
            acc_up = _add_units(acc_up, values, words, up_scale, up_zero, table, KIND, FOUR, BESIDE)
            up_scale, up_zero = next_scale, next_zero
    return acc, acc_up


@triton.jit
def numbers_in_order(
    words, scale, zero, table, DTYPE: tl.constexpr, KIND: tl.constexpr, FOUR: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Return the values of words in the order of columns, [outputs, columns] in DTYPE. The arguments are as in
    _numbers."""
    outputs: tl.constexpr = words.shape[0]
    weights = _numbers(words, scale, zero, table, DTYPE, KIND, FOUR, BESIDE)
    if FOUR:
        weights = weights.reshape(outputs, words.shape[1] // 8, 8, 2, 2).permute(0, 1, 3, 4, 2)
    return weights.reshape(outputs, words.shape[1] * (4 if FOUR else 1))


def grouped_operands(
    weight: GroupedWeight, block_inner: int
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Return what all kernels take of a weight, or of a stack of weights: tensors, sizes (units, words of a row,
    groups), and flags.

    block_inner: columns of a step.
    """
    codes, scales = weight.codes, weight.scales
    group = weight.inputs // scales.shape[-1]
    unit = min(group & -group, _UNIT)
    has, beside = weight.beside
    tensors = codes, scales, beside, codes if weight.table is None else weight.table
    flags = {
        "UNITS": max(block_inner // unit, 1), "UNIT": unit, "GROUP": group, "KIND": weight.kind,
        "FOUR": weight.kind in FOUR_BITS, "BESIDE": has,
        **overlap_options(codes.device),
    }  # fmt: skip
    return tensors, (weight.inputs // unit, codes.shape[-1], scales.shape[-1]), flags
