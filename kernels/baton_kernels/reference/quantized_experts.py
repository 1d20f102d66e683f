"""Layers of experts whose weights are quantized."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from .activation import ExpertGate, expert_gate_reference
from .experts import own_experts
from .grouped_linear import GroupedWeight, dequantize_grouped_reference
from .quantize import RowFormat, dequantize_rows_reference, quantize_rows_reference
from .scaled_linear import ScaledWeight, dequantize_scaled_reference

# The weights of all experts, whose first dimension is the expert. A plain tensor is not quantized.
ExpertCodes = GroupedWeight | ScaledWeight | torch.Tensor


class Rounding(NamedTuple):
    """How experts round their inputs. form: None = not at all. scales: those of each expert's inputs, [experts]
    float32; None = each row has a scale of its own."""

    form: RowFormat | None
    scales: torch.Tensor | None


@dataclass(frozen=True)
class QuantizedExperts:
    """The weights of a layer's experts, and the gate that they have, as in ExpertWeights.

    gate_up, down: weights of the same kind. rows: how the inputs of both products are rounded; None = not at all.
    layer_experts: as in ExpertWeights. input_scales: as in Rounding, of both products, [2, experts].
    """

    gate_up: ExpertCodes
    down: ExpertCodes
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate: ExpertGate = "silu"
    rows: RowFormat | None = None
    layer_experts: int | None = None
    input_scales: torch.Tensor | None = None

    def rounding(self, product: int) -> Rounding:
        """Return how the inputs of the first product (0) or the second one (1) are rounded."""
        return Rounding(self.rows, None if self.input_scales is None else self.input_scales[product])


def quantized_experts_reference(
    x: torch.Tensor, held: QuantizedExperts, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Compute what experts_reference does."""
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in own_experts(experts):
        tokens, choices = torch.where(experts == expert)
        inner = _product(x[tokens], held.gate_up, held.gate_up_bias, expert, held.rounding(0))
        inner = expert_gate_reference(inner, held.gate)
        result = _product(inner, held.down, held.down_bias, expert, held.rounding(1))
        out.index_add_(0, tokens, result * weights[tokens, choices, None])
    return out.to(x.dtype)


def _product(
    x: torch.Tensor, weight: ExpertCodes, bias: torch.Tensor | None, expert: int, rows: Rounding
) -> torch.Tensor:
    if rows.form is not None:
        scale = None if rows.scales is None else rows.scales[expert]
        x = dequantize_rows_reference(quantize_rows_reference(x, rows.form, scale)).to(x.dtype)
    if isinstance(weight, GroupedWeight):
        numbers = dequantize_grouped_reference(weight.at(expert), x.dtype)
    elif isinstance(weight, ScaledWeight):
        numbers = dequantize_scaled_reference(
            ScaledWeight(weight.codes[expert], weight.scales[expert], weight.tile), x.dtype
        )
    else:
        numbers = weight[expert]
    return functional.linear(x, numbers, None if bias is None else bias[expert])
