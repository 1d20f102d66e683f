"""HyperCLOVA X SEED Think (NAVER, 2025): Granite with one more norm after each block, and logits with a factor."""

from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.norm import NormedOutput, RmsNorm
from baton_engine.source import Source

from .granite import Granite, GraniteConfig, GraniteLayer, read_granite_config
from .llama import LlamaConfig


class HyperClovaXConfig(GraniteConfig, frozen=True, kw_only=True):
    post_norm: bool  # each block has a norm after it


class HyperClovaXLayer(GraniteLayer):
    def __init__(self, config: Any, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(config, source, layer, rotary)
        if config.post_norm:
            hidden, eps = config.hidden_size, config.rms_norm_eps
            self.attention = NormedOutput(self.attention, RmsNorm(source.at("post_norm1"), hidden, eps))
            self.mlp = NormedOutput(self.mlp, RmsNorm(source.at("post_norm2"), hidden, eps))


class HyperClovaX(Granite):
    layer = HyperClovaXLayer

    def __init__(self, config: Any, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        # Granite divides by this number.
        self.head.finish_with(lambda logits: logits.mul_(config.multipliers.logits))

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        dim = file.count("head_dim", file.count("hidden_size") // file.count("num_attention_heads"))
        scale = file.number("attention_multiplier", dim**-0.5)
        return read_granite_config(
            HyperClovaXConfig,
            ConfigFile({**file.fields, "attention_multiplier": scale}),
            mlp_bias=file.flag("mlp_bias"),
            post_norm=file.flag("use_post_norm", True),
        )
