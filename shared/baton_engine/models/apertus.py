"""Apertus (Swiss AI Initiative, 2025): Llama with norms of each head, and an MLP of xIELUs without gates."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope
from baton_engine.layers.xielu import XIelu
from baton_engine.source import Source

from .layer_norm_llama import plain_mlp
from .llama import HIDDEN_ACTS, Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config

_CONTEXT = 65536
_THETA = 12e6
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class ApertusLayer(LlamaLayer):
    norms = ("attention_layernorm", "feedforward_layernorm")

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        source = source.at("mlp")
        activation = XIelu(source.at("act_fn")) if config.activation == "xielu" else None
        return plain_mlp(config, source, ("up_proj", "down_proj"), activation)


class Apertus(Llama):
    layer = ApertusLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, value in (("qk_norm", True), ("post_norm", False), ("mlp_bias", False)):
            file.require_absent(name, value)
        if not (file.fields.get("rope_parameters") or file.fields.get("rope_scaling")):
            file = ConfigFile({**file.fields, "rope_scaling": _ROPE})
        bias, context = file.flag("attention_bias"), file.count("max_position_embeddings", _CONTEXT)
        return read_llama_config(
            LlamaConfig,
            file,
            Defaults(_CONTEXT, rms_norm_eps=1e-5),
            rope=read_rope(file, context, theta=_THETA),
            activation="xielu",
            activations={"xielu": "xielu", **HIDDEN_ACTS},
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
        )
