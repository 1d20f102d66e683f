"""A norm whose result decides how much of each of its elements goes on."""

from typing import Any

import torch
from torch.nn import functional

from baton_engine.inputs import OutputRows
from baton_engine.source import Source

from .linear import Linear
from .norm import RmsNorm


class GatedNorm:
    """y * sigmoid(up(silu(down(y)))), where y is the RMS norm of the input and the two projections lead to a few
    elements and back (SK Telecom, A.X K2, 2026). All ranks compute the same. rank: those few elements."""

    def __init__(self, source: Source, size: int, eps: float, rank: int) -> None:
        self._norm = RmsNorm(source.at("norm"), size, eps)
        # They are so small that quantizing them would save no memory.
        self._down = Linear(source, ["W_down"], [rank], size, sensitive=True)
        self._up = Linear(source, ["W_up"], [size], rank, sensitive=True)

    def add(self, x: OutputRows, residual: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        """As RmsNorm.add does."""
        normed, total = self._norm.add(x, residual)
        gates = self._up(functional.silu(self._down(normed)))
        return (normed * gates.float().sigmoid()).to(normed.dtype), total
