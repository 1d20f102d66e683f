"""Layers of experts whose weights are quantized."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from .activation import ExpertGate, expert_gate_reference
from .experts import own_experts
from .grouped_linear import GroupedWeight, dequantize_grouped_reference
from .quantize import RowFormat, dequantize_rows_reference, quantize_rows_reference
from .scaled_linear import ScaledWeight, dequantize_scaled_reference

# The weights of all experts, whose first dimension is the expert. A plain tensor is not quantized.
ExpertCodes = GroupedWeight | ScaledWeight | torch.Tensor


@dataclass(frozen=True)
class QuantizedExperts:
    """The weights of a layer's experts, and the gate that they have, as in ExpertWeights.

    gate_up, down: weights of the same kind. rows: how the inputs of both products are rounded; None = not at all.
    layer_experts: as in ExpertWeights.
    """

    gate_up: ExpertCodes
    down: ExpertCodes
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate: ExpertGate = "silu"
    rows: RowFormat | None = None
    layer_experts: int | None = None


def quantized_experts_reference(
    x: torch.Tensor, held: QuantizedExperts, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Compute what experts_reference does."""
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in own_experts(experts):
        tokens, choices = torch.where(experts == expert)
        inner = _product(x[tokens], held.gate_up, held.gate_up_bias, expert, held.rows)
        inner = expert_gate_reference(inner, held.gate)
        result = _product(inner, held.down, held.down_bias, expert, held.rows)
        out.index_add_(0, tokens, result * weights[tokens, choices, None])
    return out.to(x.dtype)


def _product(
    x: torch.Tensor, weight: ExpertCodes, bias: torch.Tensor | None, expert: int, rows: RowFormat | None
) -> torch.Tensor:
    if rows is not None:
        x = dequantize_rows_reference(quantize_rows_reference(x, rows)).to(x.dtype)
    if isinstance(weight, GroupedWeight):
        numbers = dequantize_grouped_reference(weight.at(expert), x.dtype)
    elif isinstance(weight, ScaledWeight):
        numbers = dequantize_scaled_reference(
            ScaledWeight(weight.codes[expert], weight.scales[expert], weight.tile), x.dtype
        )
    else:
        numbers = weight[expert]
    return functional.linear(x, numbers, None if bias is None else bias[expert])
