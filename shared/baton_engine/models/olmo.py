"""OLMo 1 (Groeneveld et al., 2024): Llama with LayerNorms that have no weights, maybe with limits of q, k and v."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.limited import Limited
from baton_engine.source import Source

from .layer_norm_llama import LayerNormConfig, LayerNormLayer, LayerNormLlama
from .llama import Defaults, LlamaConfig, read_llama_config


class OlmoConfig(LayerNormConfig, frozen=True, kw_only=True):
    limit: float | None  # of the absolute values of queries, keys and values


class OlmoLayer(LayerNormLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, OlmoConfig)
        qkv = super().qkv(config, source)
        return qkv if config.limit is None else Limited(qkv, config.limit)


class Olmo(LayerNormLlama):
    layer = OlmoLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias = file.flag("attention_bias")
        return read_llama_config(
            OlmoConfig,
            file,
            Defaults(2048),
            eps=1e-5,
            norm_weight=False,
            norm_bias=False,
            qkv_bias=bias,
            output_bias=bias,
            limit=None if file.fields.get("clip_qkv") is None else file.number("clip_qkv"),
        )
