"""Layers with a norm before and one after each block."""

from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.inputs import OutputRows
from baton_engine.layers.norm import RmsNorm
from baton_engine.source import Source

from .llama import LlamaConfig, LlamaLayer


class NormedAround(LlamaLayer):
    """A Llama layer with norms after its blocks, too. post_norms: the names of those after attention and the MLP."""

    post_norms = ("post_self_attn_layernorm", "post_mlp_layernorm")

    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        super().__init__(config, source, layer, rotary)
        hidden, eps, offsets = config.hidden_size, self.post_eps(config), self.post_offsets(config)
        self.attended_norm, self.post_mlp_norm = (
            RmsNorm(source.at(name), hidden, eps, offset) for name, offset in zip(self.post_norms, offsets, strict=True)
        )

    def post_eps(self, config: LlamaConfig) -> float:
        """Return the epsilon of the norms after blocks."""
        return config.rms_norm_eps

    def post_offsets(self, config: LlamaConfig) -> tuple[float, float]:
        """Return the offsets of the norms after attention and after the MLP, as in RmsNorm."""
        return config.norm_offset, config.norm_offset

    def __call__(self, x: OutputRows, residual: torch.Tensor | None, ctx: Context) -> tuple[Any, torch.Tensor]:
        """As LlamaLayer does. The norm of the result is left to the next norm."""
        normed, residual = self.input_norm.add(x, residual)
        x = self.attended_norm.later(self.attention(normed, ctx))
        normed, residual = self.post_attention_norm.add(x, residual)
        return self.post_mlp_norm.later(self.mlp(normed)), residual
