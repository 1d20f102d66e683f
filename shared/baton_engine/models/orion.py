"""Orion (OrionStar, 2024): Llama with LayerNorms."""

from baton_engine.config_file import ConfigFile

from .layer_norm_llama import LayerNormConfig, LayerNormLlama
from .llama import SILU, Defaults, LlamaConfig, read_llama_config


class Orion(LayerNormLlama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("attention_bias", False)
        return read_llama_config(LayerNormConfig, file, Defaults(4096, rms_norm_eps=1e-5), activations=SILU)
