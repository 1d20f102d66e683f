"""Attention whose queries and keys are normalized after their rotation."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.model_config import ModelConfig
from baton_engine.source import Source

from .attention import Attention
from .linear import Linear
from .norm import RmsNorm


class NormedAfterRope(Attention):
    """Attention with norms of each rotated query and key head. norms: of queries and of keys.

    A rotation does not change the root mean square of a head, so heads are divided by it before they are rotated. Only
    the weights of the norms must be applied after the rotation. A score is a sum of products of one element of the
    query and one of the key, so the queries get the weights of both norms, and keys are cached without weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        source: Source,
        qkv: Callable[[Any], torch.Tensor],
        output: Linear,
        rotary: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[RmsNorm, RmsNorm],
    ) -> None:
        super().__init__(config, layer, source, qkv, output, rotary, norms)
        of_queries, of_keys = norms
        self._weights = of_queries.weight.float() * of_keys.weight.float()
        self._norms = (torch.ones_like(of_queries.weight),) * 2

    def queries(self, x: InputRows, ctx: Context) -> torch.Tensor:
        return super().queries(x, ctx).mul_(self._weights)
