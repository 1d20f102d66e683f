"""A projection to queries, keys and values, of which the queries are computed from a vector of low rank."""

import torch

from baton_engine.inputs import NUMBERS

from .linear import Linear
from .norm import RmsNorm


class LowRankQueries:
    """Queries are a projection of a vector that all heads share, after a norm of it; keys and values are plain
    projections (Huang et al., "Multi-matrix Factorization Attention", 2025).

    low: to the shared vector. queries: from it. keyed: to keys and values side by side.
    """

    def __init__(self, low: Linear, norm: RmsNorm, queries: Linear, keyed: Linear) -> None:
        self._low, self._norm, self._queries, self._keyed = low, norm, queries, keyed
        self.inputs = NUMBERS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, outputs]."""
        return torch.cat([self._queries(self._norm(self._low(x))), self._keyed(x)], dim=1)
