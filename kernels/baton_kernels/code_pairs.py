"""Decodes words of 4-bit codes into pairs of floats, in the registers from which Hopper's tensor cores take them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _int4_pairs(pair: str, base: int, scaled: str) -> str:
    """Return PTX that decodes two words of four int4 codes each ($4) into four pairs of scaled floats ($0 to $3).

    A code is placed in the lowest bits of a power of two, which gives the float power + code. Subtracting power + zero
    ($5) from it is exact. pair: the PTX type of two floats. base: the bits of the power of two. scaled: PTX that
    multiplies the difference t by its scale.
    """
    codes = ["mov.b32 t, $4;", *(f"shr.u32 t, $4, {4 * code};" for code in (1, 2, 3))]
    steps = [
        f"""    {shifted}
    lop3.b32 t, t, 0x000f000f, 0x{base:04x}{base:04x}, 0xea;
    sub.{pair} t, t, $5;
    {scaled.format(f"${code}", pair=pair)}
"""
        for code, shifted in enumerate(codes)
    ]
    return "{\n    .reg .b32 t, u;\n" + "".join(steps) + "}"


_NOT_SCALED = "mov.b32 {}, t;"
_SCALED = "mul.{pair} {}, t, $6;"
# A scale that the floats' type cannot represent is the sum of two that it can ($6 and $7). The product with a float16
# scale is rounded only once, as a code has at most 4 bits and the second part of the scale has 3.
_SCALED_TWICE = "mul.{pair} u, t, $7;\n    fma.rn.{pair} {}, t, $6, u;"
# The bases are 128 in bfloat16 and 1024 in float16.
_INT4_BFLOAT16 = gl.constexpr(_int4_pairs("bf16x2", 0x4300, _SCALED))
_INT4_BFLOAT16_FINE = gl.constexpr(_int4_pairs("bf16x2", 0x4300, _SCALED_TWICE))
_INT4_BFLOAT16_UNSCALED = gl.constexpr(_int4_pairs("bf16x2", 0x4300, _NOT_SCALED))
_INT4_FLOAT16_UNSCALED = gl.constexpr(_int4_pairs("f16x2", 0x6400, _NOT_SCALED))
_INT4_FLOAT16 = gl.constexpr(_int4_pairs("f16x2", 0x6400, _SCALED))
_INT4_FLOAT16_FINE = gl.constexpr(_int4_pairs("f16x2", 0x6400, _SCALED_TWICE))


def _e2m1_pairs(scaled: tuple[str, ...]) -> str:
    """Return PTX that decodes e2m1 codes in the same way; they have no zero.

    The sign and the three other bits of a code become those of a bfloat16 that is 2 ** -126 times the code's value. It
    is multiplied by 2 ** 126 times the scale. scaled: for each code of a word, PTX that multiplies t by its scale.
    """
    steps = []
    for code in range(4):
        magnitude, sign = 6 - 4 * code, 12 - 4 * code
        shifts = [f"shl.b32 {to}, $4, {by};" if by >= 0 else f"shr.u32 {to}, $4, {-by};"
                  for to, by in (("t", magnitude), ("u", sign))]  # fmt: skip
        steps.append(f"""    {shifts[0]}
    and.b32 t, t, 0x01c001c0;
    {shifts[1]}
    lop3.b32 t, u, 0x80008000, t, 0xea;
    {scaled[code].format(f"${code}", pair="bf16x2")}
""")
    return "{\n    .reg .b32 t, u;\n" + "".join(steps) + "}"


_E2M1 = gl.constexpr(_e2m1_pairs(("mul.{pair} {}, t, $5;",) * 4))
# The first two codes of a word and the last two have scales of their own.
_E2M1_HALVES = gl.constexpr(_e2m1_pairs(("mul.{pair} {}, t, $5;",) * 2 + ("mul.{pair} {}, t, $6;",) * 2))


@gluon.constexpr_function
def words_layout(outputs, words):
    """Return the layout of words [outputs, words] of four codes over a warp group: each thread has the words whose
    decoded values the tensor cores take from its registers."""
    registers = [[0, 1], [8, 0]]
    registers += [[0, 1 << bit] for bit in range(3, words.bit_length() - 1)]
    registers += [[1 << bit, 0] for bit in range(6, outputs.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [outputs, words])


@gluon.constexpr_function
def _four_of(dtype):
    return (dtype,) * 4


@gluon.jit
def _spread(values, shape: gl.constexpr):
    """Repeat the values of groups, [outputs, groups], for each of a group's words: [outputs, groups, words]."""
    return values.expand_dims(2).broadcast_to(shape)


@gluon.jit
def _half_scale(bits, shape: gl.constexpr):
    """Return 2 ** 118 times scales, repeated for the words of their groups.

    bits: [outputs, groups] int32, whose lowest 8 bits are a positive float8_e4m3fn.
    """
    # The bits of a float32 that is 2 ** -120 times the scale: its exponent has a bias of 127 instead of 7.
    scale = ((bits & 255) << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36
    return _spread((scale * 3.3230699894622897e35).to(gl.bfloat16), shape)


@gluon.jit
def _zeros(words, zero, DTYPE: gl.constexpr, BESIDE: gl.constexpr):
    """Return the zeros of groups [outputs, groups] for their words [outputs, groups, words], plus the power of two in
    which a code is placed."""
    base: gl.constexpr = 128.0 if gl.bfloat16 == DTYPE else 1024.0
    zeros = gl.full(words.shape, base + 8.0, DTYPE, words.type.layout)
    if BESIDE == "zeros":
        zeros = _spread((zero.to(gl.float32) + base).to(DTYPE), words.shape)
    return zeros


@gluon.jit
def _in_columns(one, two, three, last):
    """Return the numbers of the four codes of words, [outputs, groups, words] each, as [outputs, columns]."""
    outputs: gl.constexpr = one.shape[0]
    blocks: gl.constexpr = one.shape[1] * one.shape[2] // 8
    numbers = gl.join(gl.join(one, three), gl.join(two, last))
    # The codes of a word belong to columns 8 apart.
    return numbers.reshape([outputs, blocks, 8, 2, 2]).permute((0, 1, 3, 4, 2)).reshape([outputs, 32 * blocks])


@gluon.jit
def int4_of(words, zero, DTYPE: gl.constexpr, BESIDE: gl.constexpr):
    """Decode words [outputs, words] of int4 codes without their scales; return [outputs, columns].

    zero: the zeros of groups, [outputs, groups], if BESIDE is "zeros".
    """
    groups: gl.constexpr = zero.shape[1]
    shape: gl.constexpr = [words.shape[0], groups, words.shape[1] // groups]
    words = words.reshape(shape)
    one, two, three, last = gl.inline_asm_elementwise(
        _INT4_BFLOAT16_UNSCALED if gl.bfloat16 == DTYPE else _INT4_FLOAT16_UNSCALED, "=r,=r,=r,=r,r,r",
        [words, _zeros(words, zero, DTYPE, BESIDE)], _four_of(DTYPE), is_pure=True, pack=2,
    )  # fmt: skip
    return _in_columns(one, two, three, last)


@gluon.jit
def numbers_of(words, scale, zero, DTYPE: gl.constexpr, KIND: gl.constexpr, BESIDE: gl.constexpr):
    """Decode words [outputs, words] and multiply them by their scales [outputs, groups]; return [outputs, columns].

    zero: the zeros of groups if BESIDE is "zeros". If it is "factors", scale holds two scales, those of the two halves
    of a group, and the results are 2 ** -8 times the numbers, without the factors of outputs.
    """
    outputs: gl.constexpr = words.shape[0]
    count: gl.constexpr = words.shape[1]
    groups: gl.constexpr = scale.shape[1]
    shape: gl.constexpr = [outputs, groups, count // groups]
    words = words.reshape(shape)
    four: gl.constexpr = _four_of(DTYPE)
    if BESIDE == "factors":
        both = scale.to(gl.int32)
        one, two, three, last = gl.inline_asm_elementwise(
            _E2M1_HALVES, "=r,=r,=r,=r,r,r,r", [words, _half_scale(both, shape), _half_scale(both >> 8, shape)], four,
            is_pure=True, pack=2,
        )  # fmt: skip
    elif KIND == "e2m1":
        # The bits of 2 ** 126 times a scale. The bias of its exponent is 127.
        whole = ((scale.to(gl.int16) + 126) << 7).to(gl.bfloat16, bitcast=True)
        one, two, three, last = gl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r,r", [words, _spread(whole, shape)], four, is_pure=True, pack=2
        )
    else:
        bfloat16: gl.constexpr = gl.bfloat16 == DTYPE
        zeros = _zeros(words, zero, DTYPE, BESIDE)
        coarse = scale.to(DTYPE)
        if scale.dtype == DTYPE:
            one, two, three, last = gl.inline_asm_elementwise(
                _INT4_BFLOAT16 if bfloat16 else _INT4_FLOAT16, "=r,=r,=r,=r,r,r,r",
                [words, zeros, _spread(coarse, shape)], four, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            rest = (scale.to(gl.float32) - coarse.to(gl.float32)).to(DTYPE)
            one, two, three, last = gl.inline_asm_elementwise(
                _INT4_BFLOAT16_FINE if bfloat16 else _INT4_FLOAT16_FINE, "=r,=r,=r,=r,r,r,r,r",
                [words, zeros, _spread(coarse, shape), _spread(rest, shape)], four, is_pure=True, pack=2,
            )  # fmt: skip
    return _in_columns(one, two, three, last)
