"""Persimmon (Adept, 2023): LayerNorms, also of each head, biases, and an MLP of squared ReLUs."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.fused_qkv import order_by_kv_head
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source

from .layer_norm_llama import LayerNormConfig, LayerNormLlama, PlainMlpLayer, with_shared_head_norms
from .llama import Defaults, LlamaConfig, fused_qkv, llama_fields, read_llama_config

_CONTEXT = 16384


class PersimmonConfig(LayerNormConfig, frozen=True, kw_only=True):
    head_norms: bool  # LayerNorms of queries and keys


class PersimmonLayer(PlainMlpLayer):
    output = "dense"
    projections = ("dense_h_to_4h", "dense_4h_to_h")

    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, PersimmonConfig)
        order = order_by_kv_head(config.num_heads, config.num_kv_heads, config.head_dim)
        qkv = fused_qkv(config, source, "query_key_value", order)
        return with_shared_head_norms(config, source, qkv) if config.head_norms else qkv


class Persimmon(LayerNormLlama):
    layer = PersimmonLayer
    final_norm = "final_layernorm"

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = llama_fields(
            file, hidden_size=("hidden_size", 4096), num_hidden_layers=("num_hidden_layers", 36),
            num_attention_heads=("num_attention_heads", 64), intermediate_size=("intermediate_size", 16384),
        )  # fmt: skip
        return read_llama_config(
            PersimmonConfig,
            ConfigFile({"vocab_size": 262144, "eos_token_id": 2, **file.fields}),
            Defaults(_CONTEXT),
            eps=file.number("layer_norm_eps", 1e-5),
            rope=read_rope(file, file.count("max_position_embeddings", _CONTEXT), partial=0.5),
            activation="relu2",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            head_norms=file.flag("qk_layernorm", True),
        )
