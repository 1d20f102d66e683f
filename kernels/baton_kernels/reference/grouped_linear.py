"""Products with weights of 4 or 8 bits whose columns form groups, each with a scale for each output."""

from typing import NamedTuple

import torch
from torch.nn import functional

# Codes of 4 bits lie in blocks of 32 columns: byte j of a block holds column j in its low half and column 16 + j in its
# high half, so that a kernel reads the inputs of either half in one piece.
BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class GroupedWeight(NamedTuple):
    """A weight [outputs, inputs] = value(codes) * scales.

    kind: what a code's value is. "int4" and "int8": the code minus the zero of its group. "e2m1": a 4-bit float of the
    OCP Microscaling specification. "table": an entry of `table`, [16] float32. "fp8": float8_e4m3fn.
    codes: [outputs, inputs / 2] uint8 in blocks of BLOCK columns, or [outputs, inputs] uint8 for kinds of 8 bits.
    scales: [outputs, groups] in a floating-point dtype; uint8 = exponents of two with a bias of 127 (E8M0). Groups have
    the same number of columns, a multiple of BLOCK. zeros: [outputs, groups] uint8, or None for 8 and 128.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    table: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        return self.codes.shape[-1] * (2 if self.kind in FOUR_BITS else 1)


FOUR_BITS = ("int4", "e2m1", "table")


def pack_four_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [..., K] uint8 of 4 bits as [..., K / 2] in blocks of BLOCK columns."""
    blocks = codes.unflatten(-1, (-1, 2, BLOCK // 2))
    packed: torch.Tensor = (blocks[..., 0, :] | (blocks[..., 1, :] << 4)).flatten(-2)
    return packed


def unpack_four_bits(packed: torch.Tensor) -> torch.Tensor:
    """Invert pack_four_bits."""
    blocks = packed.unflatten(-1, (-1, BLOCK // 2))
    return torch.stack((blocks & 15, blocks >> 4), dim=-2).flatten(-3)


def exponents_to_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (exponent - 127) of E8M0 exponents, uint8, as float32; 255 stands for NaN."""
    bits = torch.where(exponents == 0, 1 << 22, exponents.int() << 23).int().view(torch.float32)
    return torch.where(exponents == 255, torch.nan, bits)


def dequantize_grouped_reference(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight, [outputs, inputs]; computed in float32."""
    codes = unpack_four_bits(weight.codes) if weight.kind in FOUR_BITS else weight.codes
    outputs, groups = weight.scales.shape
    if weight.kind == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    elif weight.kind in ("int4", "int8"):
        values = codes.float()
    else:
        table = torch.tensor(E2M1, device=codes.device) if weight.table is None else weight.table
        values = table[codes.int()]
    values = values.view(outputs, groups, -1)
    if weight.kind in ("int4", "int8"):
        middle = 8 if weight.kind == "int4" else 128
        values = values - (middle if weight.zeros is None else weight.zeros.float()[..., None])
    scales = exponents_to_scales(weight.scales) if weight.scales.dtype == torch.uint8 else weight.scales.float()
    return (values * scales[..., None]).view(outputs, -1).to(dtype)


def grouped_linear_reference(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [T, inputs]. bias: [outputs] or None. Returns x weightᵀ + bias, [T, outputs]."""
    return functional.linear(x, dequantize_grouped_reference(weight, x.dtype), bias)
