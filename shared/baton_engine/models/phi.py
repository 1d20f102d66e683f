"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al., 2023): attention and MLP in parallel after one LayerNorm, biases."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source

from .layer_norm_llama import LayerNormConfig, LayerNormLlama, PlainMlpLayer, with_shared_head_norms
from .llama import Defaults, LlamaConfig, read_llama_config


class PhiConfig(LayerNormConfig, frozen=True, kw_only=True):
    head_norms: bool  # LayerNorms of queries and keys


class PhiLayer(PlainMlpLayer):
    output = "dense"

    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, PhiConfig)
        qkv = super().qkv(config, source)
        return with_shared_head_norms(config, source, qkv) if config.head_norms else qkv


class Phi(LayerNormLlama):
    layer = PhiLayer
    final_norm = "final_layernorm"
    head_bias = True

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_llama_config(
            PhiConfig,
            file,
            Defaults(2048),
            eps=file.number("layer_norm_eps", 1e-5),
            rope=read_rope(file, file.count("max_position_embeddings", 2048), partial=0.5),
            activation="gelu_new",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            parallel=True,
            two_norms=False,
            head_norms=file.flag("qk_layernorm"),
        )
