"""Granite 3 (IBM, 2024): Llama with separate factors for embeddings, attention scores, residuals and logits."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.source import Source

from .llama import Defaults, Kind, Layer, Llama, LlamaConfig, LlamaLayer, read_llama_config


class Multipliers(msgspec.Struct, frozen=True):
    """The factors of embeddings and of what blocks add to the residual, and the number by which logits are divided."""

    embeddings: float
    residual: float
    logits: float


class GraniteConfig(LlamaConfig, frozen=True, kw_only=True):
    multipliers: Multipliers

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "multipliers": [self.multipliers.embeddings, self.multipliers.residual]}


class GraniteLayer(LlamaLayer):
    def __init__(self, config: Any, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(config, source, layer, rotary)
        self.multiplier = config.multipliers.residual

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_norm.add(x, residual)
        x = self.attention(normed, ctx).mul_(self.multiplier)
        normed, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(normed).mul_(self.multiplier), residual


class Granite(Llama):
    layer: Callable[..., Layer] = GraniteLayer

    def __init__(self, config: Any, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.multiplier = config.multipliers.embeddings
        self.head.finish_with(lambda logits: logits.div_(config.multipliers.logits))

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_granite_config(GraniteConfig, file, mlp_bias=file.flag("mlp_bias"))

    def embed(self, ctx: Context) -> torch.Tensor:
        return super().embed(ctx).mul_(self.multiplier)


def read_granite_config(kind: type[Kind], file: ConfigFile, **facts: Any) -> Kind:
    """Return the config of a config.json with Granite's fields. kind, which has multipliers, and facts: as in
    read_llama_config."""
    bias = file.flag("attention_bias")
    return read_llama_config(
        kind,
        file,
        Defaults(2048),
        scale=file.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
        multipliers=Multipliers(
            file.number("embedding_multiplier", 1.0),
            file.number("residual_multiplier", 1.0),
            file.number("logits_scaling", 1.0),
        ),
        **facts,
    )
