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
from .norm import RmsNorm


class GatedAttention(Attention):
    """Attention whose results are multiplied by the sigmoid of another projection of its inputs (Qiu et al., "Gated
    Attention for Large Language Models", 2025).

    gate: the projection to the gates of this rank's heads, [T, heads * head_dim].
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        source: Source,
        qkv: Callable[[Any], torch.Tensor],
        gate: Linear,
        output: Linear,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        qk_norms: tuple[RmsNorm, RmsNorm] | None = None,
    ) -> None:
        super().__init__(config, layer, source, qkv, output, rotary, qk_norms)
        self._gate = gate
        # The two projections may be stored in formats that take different forms of the inputs.
        self.inputs = NUMBERS

    def __call__(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:  # type: ignore[override]
        attended = ctx.attend(self._layer, self.queries(x, ctx), self._sinks).flatten(1)
        return self._output(attended * torch.sigmoid(self._gate(x)))
