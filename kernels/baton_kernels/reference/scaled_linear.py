"""Products of rows in 8 bits with weights in 8 bits."""

from typing import NamedTuple

import torch

from .activation import gate_mul_reference
from .quantize import QuantizedRows, dequantize_rows_reference


class ScaledWeight(NamedTuple):
    """A weight [outputs, inputs] = codes * scales.

    codes: [outputs, inputs] float8_e4m3fn or int8. scales: [ceil(outputs / tile[0]), ceil(inputs / tile[1])] float32.
    tile: how many outputs and inputs share a scale; (1, inputs) = each output has one. sums: [outputs] int32, the sum
    of each output's codes, for products with rows that have zeros.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tile: tuple[int, int]
    sums: torch.Tensor | None = None


def dequantize_scaled_reference(weight: ScaledWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight, [outputs, inputs]; computed in float32."""
    outputs, inputs = weight.codes.shape
    scales = weight.scales.repeat_interleave(weight.tile[0], dim=0)[:outputs]
    scales = scales.repeat_interleave(weight.tile[1], dim=1)[:, :inputs]
    return (weight.codes.float() * scales).to(dtype)


def scaled_linear_reference(
    x: QuantizedRows, weight: ScaledWeight, bias: torch.Tensor | None, dtype: torch.dtype, gated: bool = False
) -> torch.Tensor:
    """Return x weightᵀ + bias, [T, outputs]. bias: [outputs] or None. dtype: of the result.

    gated: the first half of the outputs are gates, the second ups. Returns silu(gate) * up, [T, outputs / 2].
    """
    result = dequantize_rows_reference(x) @ dequantize_scaled_reference(weight, torch.float32).T
    result = (result if bias is None else result + bias.float()).to(dtype)
    return gate_mul_reference(result, "silu") if gated else result
