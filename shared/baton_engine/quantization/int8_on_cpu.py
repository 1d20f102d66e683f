"""Products of int8 rows and weights by oneDNN, several times as fast as float32 and with a quarter of its memory."""

import functools

import torch

from baton_engine.inputs import EightBits, InputRows, Inputs
from baton_engine.ops import Ops
from baton_kernels.reference.quantize import RowFormat

from .scaled_part import Part

_UNSIGNED_ZERO = 128  # the code of 0 when codes from -128 to 127 are counted from 0
# Larger sums of products of 8 bits with and without a sign may not fit into 32 bits.
MOST_INPUTS = 2**31 // (255 * 128)


@functools.cache
def has_int8_products() -> bool:
    """Whether this CPU multiplies int8 exactly.

    Older ones add up pairs of products in 16 bits, which can overflow.
    """
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_vnni")) and hasattr(torch.ops.onednn, "qlinear_pointwise")


class Int8OnCpu:
    """The product with an int8 weight, which has one scale for each output."""

    def __init__(self, part: Part, bias: torch.Tensor | None, form: RowFormat, dtype: torch.dtype, ops: Ops) -> None:
        weight = part.weight
        self._codes = torch.ops.onednn.qlinear_prepack(weight.codes, None)
        self._scales = weight.scales.flatten().contiguous()
        self._no_zeros = torch.zeros(len(self._scales), dtype=torch.int32)
        # The sums by which the zeros of rows are multiplied.
        self._sums = None if weight.sums is None else weight.sums * self._scales
        self.inputs = EightBits(form, part.scale, part.zero)
        self._bias, self._dtype, self._ops = bias, dtype, ops

    def __call__(self, x: InputRows, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.inputs.rounded(self._ops, x)
        # Without AMX a CPU multiplies unsigned rows with signed weights only. For signed rows
        # oneDNN takes several hundred times as long, so the codes become unsigned ones whose zero is 128.
        codes = rows.codes.view(torch.uint8).bitwise_xor(_UNSIGNED_ZERO)
        result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, _UNSIGNED_ZERO, self._codes, self._scales, self._no_zeros, None, 1.0, 0, torch.float32, "none",
            [], "",
        )  # fmt: skip
        if rows.zeros is not None and self._sums is not None:
            result -= rows.zeros[:, None] * self._sums
        result *= rows.scales
        if self._bias is not None:
            result += self._bias
        result = result.to(self._dtype)
        return result if out is None else out.copy_(result)

    def gated(self, x: InputRows, activation: str, into: Inputs) -> InputRows:
        return into.gate(self._ops, self(x), activation)
