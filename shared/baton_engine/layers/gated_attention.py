"""Attention whose results have gates."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.inputs import NUMBERS
from baton_engine.model_config import ModelConfig
from baton_engine.source import Source

from .attention import Attention
from .linear import Linear
from .norm import RmsNorm, UnitNorm


class GatedAttention(Attention):
    """Attention whose results are multiplied by a function of another projection of its inputs (Qiu et al., "Gated
    Attention for Large Language Models", 2025).

    gate: the projection to the gates of this rank's heads, [T, heads * head_dim], or [T, heads] with one for all
    numbers of a head. activation: the function.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        source: Source,
        qkv: Callable[[Any], torch.Tensor],
        gate: Linear,
        output: Linear,
        activation: Callable[[torch.Tensor], torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        qk_norms: tuple[RmsNorm, RmsNorm] | None = None,
    ) -> None:
        super().__init__(config, layer, source, qkv, output, rotary, qk_norms)
        self._gate, self._activation = gate, activation
        # The two projections may be stored in formats that take different forms of the inputs.
        self.inputs = NUMBERS

    def __call__(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:  # type: ignore[override]
        attended = self.attended(x, ctx)
        gates = torch.unflatten(self._activation(self._gate(x)), 1, (self._heads, -1))
        return self._output((attended * gates).flatten(1))

    def attended(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        """Return the results of the heads before their gates, [T, heads, head_dim]."""
        return ctx.attend(self._layer, self.queries(x, ctx), self._sinks)


class NormedGatedAttention(GatedAttention):
    """Gated attention with a norm of the result of each head, which has the epsilon of the norms of queries (Meta, Muse
    Spark, 2026)."""

    def __init__(self, config: ModelConfig, layer: int, source: Source, *parts: Any) -> None:
        super().__init__(config, layer, source, *parts)
        self._norm = UnitNorm(source, config.head_dim, self._eps)

    def attended(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        results = super().attended(x, ctx)
        return self._norm(results.reshape(-1, self._head_dim)).view_as(results)
