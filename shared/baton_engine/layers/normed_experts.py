"""Experts of fewer dimensions than the hidden states, with a norm of each expert's result."""

from collections.abc import Callable

import torch

from baton_engine.experts_method import ExpertsMethod
from baton_engine.inputs import InputRows
from baton_engine.shard import Ranks

from .experts import Router
from .linear import Linear


class NormedExperts:
    """Experts between two projections (Meta, Muse Spark, 2026).

    The input of a token's experts is down_norm(down(x)). The result is up(sum), where sum is the weighted sum of
    norm(result of each expert). All ranks compute the projections down and up.
    """

    def __init__(
        self,
        router: Router,
        down: Linear,
        down_norm: Callable[[torch.Tensor], torch.Tensor],
        experts: ExpertsMethod,
        norm: Callable[[torch.Tensor], torch.Tensor],
        up: Linear,
        ranks: Ranks,
    ) -> None:
        self._router, self._down, self._down_norm, self._experts = router, down, down_norm, experts
        self._norm, self._up, self._ranks = norm, up, ranks
        self.inputs = router.inputs

    def __call__(self, x: InputRows) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        x, weights, experts = self._router(x)
        # A norm needs the whole result of an expert, so each expert of a token gets a row of its own.
        rows = self._down_norm(self._down(x)).repeat_interleave(experts.shape[1], dim=0)
        single = torch.ones_like(weights).view(-1, 1)
        results = self._norm(self._ranks.sum(self._experts(rows, single, experts.view(-1, 1))))
        total = (results.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        return self._up(total.to(x.dtype))
