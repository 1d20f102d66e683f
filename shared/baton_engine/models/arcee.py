"""AFM-4.5B (Arcee, 2025): Llama with an MLP of squared ReLUs without gates."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.source import Source

from .layer_norm_llama import plain_mlp
from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config


class ArceeLayer(LlamaLayer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        return plain_mlp(config, source.at("mlp"), ("up_proj", "down_proj"))


class Arcee(Llama):
    layer = ArceeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias, mlp_bias = file.flag("attention_bias"), file.flag("mlp_bias")
        return read_llama_config(
            LlamaConfig,
            file,
            Defaults(4096, rms_norm_eps=1e-5),
            activation="relu2",
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=mlp_bias,
        )
