"""Products with weights of 4 or 8 bits whose columns form groups, each with a scale for each output."""

from typing import NamedTuple

import torch
from torch.nn import functional

from .activation import gate_mul_reference

# Codes of 4 bits lie in blocks of 32 columns: word j of a block, of 16 bits, holds columns j, 8 + j, 16 + j and 24 + j,
# the first in its lowest bits. So a kernel decodes the same code of two words at once, and reads its inputs in pieces.
BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class GroupedWeight(NamedTuple):
    """A weight [outputs, inputs] = value(codes) * scales.

    kind: what a code's value is. "int4" and "int8": the code minus the zero of its group. "e2m1": a 4-bit float of the
    OCP Microscaling specification. "table": an entry of `table`, [16] float32. "fp8": float8_e4m3fn.
    codes: [outputs, inputs / 4] int16 in blocks of BLOCK columns, or [outputs, inputs] uint8 for kinds of 8 bits.
    scales: [outputs, groups] in a floating-point dtype; uint8 = exponents of two with a bias of 127 (E8M0), as
    held_exponents returns them. int16 = two positive float8_e4m3fn, the scales of the first and the second half of a
    group of BLOCK columns, the first in the low bits. Groups have the same number of columns, a multiple of BLOCK.
    zeros: [outputs, groups] uint8; None = 8 for codes of 4 bits, 128 for codes of 8 bits. factors: [outputs] float32;
    scales in int16 are multiplied by them.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    table: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        return self.codes.shape[-1] * (4 if self.kind in FOUR_BITS else 1)

    @property
    def beside(self) -> tuple[str, torch.Tensor]:
        """The tensor that a kernel needs beside codes and scales, and its name; "" and any tensor if it needs none."""
        if self.zeros is not None:
            return "zeros", self.zeros
        return ("", self.codes) if self.factors is None else ("factors", self.factors)

    def at(self, index: int | slice | torch.Tensor) -> "GroupedWeight":
        """Return some outputs of the weight, or one weight of a stack."""
        zeros, factors = (None if each is None else each[index] for each in (self.zeros, self.factors))
        return self._replace(codes=self.codes[index], scales=self.scales[index], zeros=zeros, factors=factors)


# The largest exponent of a scale that kernels accept: it stands for 2 ** 1.
MOST_EXPONENT = 128
FOUR_BITS = ("int4", "e2m1", "table")


def pack_four_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [..., K] uint8 of 4 bits as [..., K / 4] int16 in blocks of BLOCK columns."""
    blocks = codes.unflatten(-1, (-1, 4, BLOCK // 4))
    low, high = (blocks[..., at, :] | (blocks[..., at + 1, :] << 4) for at in (0, 2))
    packed: torch.Tensor = torch.stack((low, high), dim=-1).view(torch.int16).flatten(-3)
    return packed


def unpack_four_bits(packed: torch.Tensor) -> torch.Tensor:
    """Invert pack_four_bits."""
    pairs = packed[..., None].view(torch.uint8).unflatten(-2, (-1, BLOCK // 4))
    low, high = pairs[..., 0], pairs[..., 1]
    return torch.stack((low & 15, low >> 4, high & 15, high >> 4), dim=-2).flatten(-3)


def held_exponents(exponents: torch.Tensor) -> torch.Tensor:
    """Return E8M0 exponents, uint8, in the form of GroupedWeight.scales: unchanged, or as float32 scales if one is NaN
    or so large that a kernel's values would overflow. The limit is 2, far above the scales of real weights."""
    if exponents.is_meta or exponents.amax() <= MOST_EXPONENT:
        return exponents
    return exponents_to_scales(exponents)


def exponents_to_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (exponent - 127) of E8M0 exponents, uint8, as float32; 255 stands for NaN."""
    bits = torch.where(exponents == 0, 1 << 22, exponents.int() << 23).int().view(torch.float32)
    return torch.where(exponents == 255, torch.nan, bits)


def scales_of(weight: GroupedWeight) -> torch.Tensor:
    """Return the scales of a weight as numbers, [outputs, groups or halves of groups] float32."""
    if weight.scales.dtype == torch.uint8:
        return exponents_to_scales(weight.scales)
    if weight.factors is None:
        return weight.scales.float()
    return weight.scales.view(torch.float8_e4m3fn).float() * weight.factors[:, None]


def dequantize_grouped_reference(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight, [outputs, inputs]; computed in float32."""
    codes = unpack_four_bits(weight.codes) if weight.kind in FOUR_BITS else weight.codes
    outputs = len(weight.scales)
    if weight.kind == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    elif weight.kind in ("int4", "int8"):
        values = codes.float()
    else:
        table = torch.tensor(E2M1, device=codes.device) if weight.table is None else weight.table
        values = table[codes.int()]
    scales = scales_of(weight)
    values = values.view(outputs, scales.shape[1], -1)
    if weight.kind in ("int4", "int8"):
        middle = 8 if weight.kind == "int4" else 128
        values = values - (middle if weight.zeros is None else weight.zeros.float()[..., None])
    return (values * scales[..., None]).view(outputs, -1).to(dtype)


def grouped_linear_reference(
    x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """x: [T, inputs]. bias: [outputs] or None. Returns x weightᵀ + bias, [T, outputs].

    gated: the first half of the outputs are gates, the second ups. Returns silu(gate) * up, [T, outputs / 2].
    """
    result = functional.linear(x, dequantize_grouped_reference(weight, x.dtype), bias)
    return gate_mul_reference(result, "silu") if gated else result
