"""Attention whose queries are multiplied by a factor that depends on their position."""

import math
from collections.abc import Callable
from functools import cache

import torch

from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.model_config import ModelConfig
from baton_engine.source import Source

from .attention import Attention
from .linear import Linear


class PositionScaledAttention(Attention):
    """scales: the factor of the queries at each position, [positions]; None = 1 everywhere."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        source: Source,
        qkv: Callable[[torch.Tensor], torch.Tensor],
        output: Linear,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        scales: torch.Tensor | None,
    ) -> None:
        super().__init__(config, layer, source, qkv, output, rotary)
        self._scales = scales

    def queries(self, x: InputRows, ctx: Context) -> torch.Tensor:
        q = super().queries(x, ctx)
        return q if self._scales is None else q.mul_(self._scales[ctx.positions].view(-1, 1, 1))


def log_scales(trained: int, max_positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [max_positions] factors that keep the entropy of attention in contexts longer than the trained one: the
    logarithm, to the base of the trained length, of the number of tokens that a query sees, and at least 1 (Su,
    "Entropy invariance of attention", 2021)."""
    scales = [math.log(seen, trained) if seen > trained else 1.0 for seen in range(1, max_positions + 1)]
    return torch.tensor(scales, dtype=dtype, device=device)


@cache
def stepped_scales(
    trained: int, growth: float, max_positions: int, dtype: torch.dtype, device: torch.device, first: int = 0
) -> torch.Tensor:
    """Return [max_positions] factors 1 + growth * log(1 + number // trained), as Llama 4 has them. first: the number of
    the first position."""
    steps = torch.arange(first, first + max_positions, device=device) // trained
    return (1 + growth * torch.log1p(steps.float())).to(dtype)
