"""The choice of each token's experts by a router (Shazeer et al., "Outrageously Large Neural Networks", 2017)."""

from dataclasses import dataclass

import torch
from torch.nn import functional

# Stands for an expert whose results another process computes.
NOT_OWN = -1


@dataclass(frozen=True)
class Routing:
    """How the logits of a router become the experts of a token and their weights.

    count: experts per token. sigmoid: an expert's score is the sigmoid of its logit; otherwise the scores are the
    softmax of all logits, or with `root_softplus` the square roots of log(1 + exp(logit)) (DeepSeek-AI, "DeepSeek-V4",
    2026). normalize: the weights of a token, which are the scores of its experts, are divided by their
    sum and `added`, which keeps the sum above zero. scale: factor of the weights. near: if above 0, the weight of an
    expert is its share in a softmax over the logits near its own. These are the logits of experts not chosen before it
    that are lower by at most this fraction of the larger of its logit and their own absolute value (Liu et al., "GRIN:
    GRadient-INformed MoE", 2024). groups: consecutive experts form this many groups of the same size. A token gets
    experts only from used_groups groups: those in which the group_best highest scores have the largest sum
    (DeepSeek-AI, "DeepSeek-V2", 2024, and "DeepSeek-V3 Technical Report", 2024). corrects_logits: the correction is
    added to logits instead of scores. softcap: logits become softcap * tanh(logit / softcap) first; 0 = off. own: the
    experts whose results this process computes. They are numbered from 0; every other chosen expert becomes NOT_OWN.
    None = all experts.
    """

    count: int
    sigmoid: bool = False
    root_softplus: bool = False
    normalize: bool = False
    added: float = 1e-20
    scale: float = 1.0
    near: float = 0.0
    groups: int = 1
    used_groups: int = 1
    group_best: int = 1
    corrects_logits: bool = False
    softcap: float = 0.0
    own: range | None = None


def choose_reference(
    logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing, scales: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by their logits, [T, experts] in float32 or float64.

    correction: [experts] float32, added to the scores or logits for the choice but not for the weights (Wang et al.,
    "Auxiliary-Loss-Free Load Balancing", 2024); None = 0. scales: [experts] float32, by which the weights of each
    expert are multiplied; None = 1. Returns the weights, [T, count] in the logits' dtype, and the experts, [T, count]
    int32, in the order in which they are chosen.
    """
    if routing.softcap:
        logits = (logits / routing.softcap).tanh() * routing.softcap
    scores = scores_of(logits, routing)
    # Sigmoids of large logits are equal in float32, so the logits are compared where no correction is added.
    plain = routing.near or (routing.sigmoid and routing.used_groups == routing.groups and correction is None)
    merit = logits if plain or routing.corrects_logits else scores
    if correction is not None:
        merit = merit + correction
    if routing.used_groups < routing.groups:
        grouped = merit.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(routing.group_best, dim=-1).values.sum(dim=-1)
        used = best.topk(routing.used_groups, dim=-1).indices
        unused = torch.ones_like(best, dtype=torch.bool).scatter_(-1, used, False)
        merit = grouped.masked_fill(unused.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = merit.topk(routing.count, dim=-1).indices
    weights = _near_shares(logits, routing) if routing.near else scores.gather(-1, experts)
    weights = weights_of(weights, routing)
    if scales is not None:
        weights = weights * scales[experts]
    return weights, own_numbers(experts, routing).int()


def scores_of(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the scores of all experts. logits: [T, experts]."""
    if routing.root_softplus:
        return functional.softplus(logits).sqrt()
    return logits.sigmoid() if routing.sigmoid else logits.softmax(dim=-1)


def weights_of(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the weights of a token's experts. scores: of these, [T, count]."""
    if routing.normalize:
        scores = scores / (scores.sum(dim=-1, keepdim=True) + routing.added)
    return scores * routing.scale


def own_numbers(experts: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the numbers that experts have here. experts: [T, count], by their numbers among all."""
    if routing.own is None:
        return experts
    elsewhere = (experts < routing.own.start) | (experts >= routing.own.stop)
    return (experts - routing.own.start).masked_fill_(elsewhere, NOT_OWN)


def _near_shares(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the weights of the experts with the greatest logits, as `near` of Routing has them."""
    shares, left = [], logits
    for _ in range(routing.count):
        top, chosen = left.max(dim=-1, keepdim=True)
        far = (top - left) / torch.maximum(left.abs(), top) > routing.near
        shares.append(1 / (left - top).masked_fill(far, float("-inf")).exp().sum(dim=-1, keepdim=True))
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(shares, dim=-1)


def route_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    routing: Routing,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, and the weights and experts of choose_reference for the logits x weightᵀ + bias. The logits stay in
    float32 or above, because a rounded logit may choose another expert.

    x: [T, hidden]; on a GPU also a PendingNorm, whose computed rows are returned. weight: [experts, hidden]. bias:
    [experts] or None.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    return x, *choose_reference(logits, correction, routing, scales)
