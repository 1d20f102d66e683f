"""Nemotron-4 and Minitron (NVIDIA, 2024): LayerNorms, squared ReLU, half of each head rotated."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope

from .layer_norm_llama import LayerNormConfig, LayerNormLlama, PlainMlpLayer
from .llama import Defaults, LlamaConfig, read_llama_config


class NemotronLayer(PlainMlpLayer):
    projections = ("up_proj", "down_proj")


class Nemotron(LayerNormLlama):
    layer = NemotronLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias = file.flag("attention_bias")
        return read_llama_config(
            LayerNormConfig,
            file,
            Defaults(4096),
            eps=file.number("norm_eps", 1e-5),
            rope=read_rope(file, file.count("max_position_embeddings", 4096), partial=0.5),
            activation="relu2",
            norm_offset=1.0,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias"),
        )
