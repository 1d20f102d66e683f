"""Layers of experts, of which each token uses a few (Shazeer et al., "Outrageously Large Neural Networks", 2017)."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from .activation import ExpertGate, expert_gate_reference
from .routing import NOT_OWN


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a layer's experts, and the gate that they have.

    gate_up: [experts, 2 * size, hidden], gates first, or with NoGate the ups, [experts, size, hidden]. down: [experts,
    hidden, size]. gate_up_bias: as many as rows of gate_up, and down_bias: [experts, hidden]; None = 0. layer_experts:
    the number of experts of the whole layer, if these are only a part of them; None = these are all.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate: ExpertGate = "silu"
    layer_experts: int | None = None


def experts_reference(
    x: torch.Tensor, held: ExpertWeights, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Return for each token the weighted sum of its experts' down(gate of gate_up(x)), [T, hidden].

    x: [T, hidden]. weights and experts: as choose_reference returns them. Results of the experts are added up in
    float32 at least; an expert that is NOT_OWN adds nothing.
    """
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in own_experts(experts):
        tokens, choices = torch.where(experts == expert)
        up_bias, down_bias = (None if bias is None else bias[expert] for bias in (held.gate_up_bias, held.down_bias))
        inner = functional.linear(x[tokens], held.gate_up[expert], up_bias)
        inner = expert_gate_reference(inner, held.gate)
        result = functional.linear(inner, held.down[expert], down_bias)
        out.index_add_(0, tokens, result * weights[tokens, choices, None])
    return out.to(x.dtype)


def own_experts(experts: torch.Tensor) -> list[int]:
    """Return the experts that are chosen for at least one token, without NOT_OWN."""
    return [expert for expert in experts.unique().tolist() if expert != NOT_OWN]
