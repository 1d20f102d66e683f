"""Sums of hidden states and the output of a block, with weights that are learned."""

import torch

from baton_engine.source import Source


class ResidualGate:
    """Adds the output of a block to hidden states, where each of their elements decides how much of both counts (Meta,
    Muse Spark, 2026).

    With s = sigmoid(gate / temperature), the output has the weight s, and the hidden states have sqrt(1 - s²), but at
    least the root of 1e-3.
    """

    def __init__(self, source: Source, size: int, temperature: float) -> None:
        gate = source.take("gate", (size,), dtype=torch.float32) / temperature
        self._output = gate.sigmoid()
        # 1 - s² as a product loses no digits where s is nearly 1.
        self._hidden = ((-gate).sigmoid() * (1 + self._output)).clamp(min=1e-3).sqrt()

    def __call__(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """x, output: [T, size]. Returns a new tensor. The sum is rounded once."""
        return torch.addcmul(x * self._hidden, output, self._output).to(x.dtype)
