"""Experts of fewer dimensions than the hidden states."""

import torch

from baton_engine.experts_method import ExpertsMethod
from baton_engine.inputs import InputRows
from baton_engine.shard import Ranks

from .experts import ExpertMlp, Router
from .linear import Linear


class LatentExpertMlp(ExpertMlp):
    """Experts between two projections (NVIDIA, "Nemotron 3", 2025): up(weighted sum of the experts of down(x)).

    up: is linear, so each rank applies it to its own part of the sum.
    """

    def __init__(self, router: Router, down: Linear, experts: ExpertsMethod, up: Linear, ranks: Ranks) -> None:
        super().__init__(router, experts, ranks)
        self._down, self._up = down, up

    def part(self, x: InputRows, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weights, experts = self._router(x, *given)
        return x, self._up(self._experts(self._down(x), weights, experts))
