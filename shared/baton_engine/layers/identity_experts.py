"""Experts of which some compute nothing."""

from dataclasses import replace

import torch

from baton_engine.experts_method import ExpertsMethod
from baton_engine.inputs import InputRows
from baton_engine.source import Source
from baton_kernels.reference.routing import NOT_OWN, Routing

from .experts import Router


class IdentityExperts:
    """Experts, and after them `identities` more whose result is their input (Meituan, "LongCat-Flash Technical Report",
    2025). source: of the router."""

    def __init__(
        self, source: Source, routing: Routing, experts: ExpertsMethod, count: int, identities: int, hidden: int,
        correction: torch.Tensor,
    ) -> None:  # fmt: skip
        """count: how many of the experts compute. correction: of the router's scores."""
        total = count + identities
        # The router keeps the numbers of all experts, so that the identities among them are known.
        routing = replace(routing, own=range(total))
        self._router = Router(source, routing, total, hidden, correction=correction)
        self._experts, self._count, self._own = experts, count, source.own_experts(count)
        self._ranks, self.inputs = source.ranks, self._router.inputs

    def __call__(self, x: InputRows) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        x, weights, experts = self._router(x)
        share = weights.masked_fill(experts < self._count, 0.0).sum(dim=-1, keepdim=True)
        elsewhere = (experts < self._own.start) | (experts >= self._own.stop)
        own = (experts - self._own.start).masked_fill_(elsewhere, NOT_OWN)
        return self._ranks.sum(self._experts(x, weights, own)).add_(x * share)
