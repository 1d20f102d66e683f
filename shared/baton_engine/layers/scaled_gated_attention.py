"""Attention with gates whose queries are multiplied by a factor that depends on their position."""

from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.inputs import InputRows

from .gated_attention import GatedAttention


class ScaledGatedAttention(GatedAttention):
    """scales: the factor of the queries at each position, [positions] float32."""

    def __init__(self, *parts: Any, scales: torch.Tensor) -> None:
        super().__init__(*parts)
        self._scales = scales

    def queries(self, x: InputRows, ctx: Context) -> torch.Tensor:
        return super().queries(x, ctx).mul_(self._scales[ctx.positions].view(-1, 1, 1))
