"""Jais 2 (Inception, 2025): Nemotron's layers with biases and usual LayerNorms, and heads that rotate as a whole."""

from baton_engine.config_file import ConfigFile

from .layer_norm_llama import LayerNormConfig
from .llama import Defaults, LlamaConfig, read_llama_config
from .nemotron import Nemotron


class Jais2(Nemotron):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias = file.flag("attention_bias", True)
        return read_llama_config(
            LayerNormConfig,
            file,
            Defaults(8192),
            eps=file.number("layer_norm_eps", 1e-5),
            activation="relu2",
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias", True),
        )
