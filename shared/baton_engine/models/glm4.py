"""GLM-4 of 2025 (GLM Team): GLM with one more norm after each block."""

import torch

from baton_engine.context import Context
from baton_engine.inputs import OutputRows
from baton_engine.layers.norm import RmsNorm
from baton_engine.source import Source

from .glm import Glm, GlmLayer
from .llama import LlamaConfig


class Glm4Layer(GlmLayer):
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        super().__init__(config, source, layer, rotary)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attended_norm = RmsNorm(source.at("post_self_attn_layernorm"), hidden, eps)
        self.post_mlp_norm = RmsNorm(source.at("post_mlp_layernorm"), hidden, eps)

    def __call__(  # type: ignore[override]
        self, x: OutputRows, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[OutputRows, torch.Tensor]:
        normed, residual = self.input_norm.add(x, residual)
        x = self.attended_norm.later(self.attention(normed, ctx))
        normed, residual = self.post_attention_norm.add(x, residual)
        return self.post_mlp_norm.later(self.mlp(normed)), residual


class Glm4(Glm):
    layer = Glm4Layer
