"""Layers of experts, of which each token uses a few (Shazeer et al., "Outrageously Large Neural Networks", 2017)."""

import torch
from torch.nn import functional

from .activation import gate_mul_reference


def route_reference(logits: torch.Tensor, count: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by their probabilities, the softmax of the logits.

    logits: [T, experts]. count: experts of a token. normalize: divide a token's weights by their sum. Returns the
    weights, [T, count] float32, and the experts, [T, count] int32, each token's from the most probable one on.
    """
    weights, experts = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(count, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts.int()


def experts_reference(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Return for each token the weighted sum of its experts' down(silu(gate(x)) * up(x)), [T, hidden].

    x: [T, hidden]. gate_up: [experts, 2 * size, hidden], gates first. down: [experts, hidden, size]. weights and
    experts: as route_reference returns them. Results of the experts are added up in float32 at least.
    """
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in experts.unique().tolist():
        tokens, choices = torch.where(experts == expert)
        inner = gate_mul_reference(functional.linear(x[tokens], gate_up[expert]), "silu")
        out.index_add_(0, tokens, functional.linear(inner, down[expert]) * weights[tokens, choices, None])
    return out.to(x.dtype)
