"""Granite 3 (IBM, 2024): Llama with separate factors for embeddings, attention scores, residuals and logits."""

from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config


class GraniteConfig(LlamaConfig, frozen=True, kw_only=True):
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float  # logits are divided by it

    def layout(self) -> dict[str, Any]:
        return {**super().layout(), "multipliers": [self.embedding_multiplier, self.residual_multiplier]}


class GraniteLayer(LlamaLayer):
    def __init__(
        self, config: GraniteConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        super().__init__(config, source, layer, rotary)
        self.multiplier = config.residual_multiplier

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_norm.add(x, residual)
        x = self.attention(normed, ctx).mul_(self.multiplier)
        normed, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(normed).mul_(self.multiplier), residual


class Granite(Llama):
    layer = GraniteLayer

    def __init__(self, config: GraniteConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.multiplier = config.embedding_multiplier
        self.head.finish_with(lambda logits: logits.div_(config.logits_scaling))

    @classmethod
    def read_config(cls, file: ConfigFile) -> GraniteConfig:
        bias = file.flag("attention_bias")
        return read_llama_config(
            GraniteConfig,
            file,
            Defaults(2048),
            scale=file.number("attention_multiplier", 1.0),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias"),
            embedding_multiplier=file.number("embedding_multiplier", 1.0),
            residual_multiplier=file.number("residual_multiplier", 1.0),
            logits_scaling=file.number("logits_scaling", 1.0),
        )

    def embed(self, ctx: Context) -> torch.Tensor:
        return super().embed(ctx).mul_(self.multiplier)
