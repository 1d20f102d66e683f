"""GPT-NeoX Japanese (ABEJA, 2022): GPT-NeoX with attention and MLP in turn, and with no bias but one."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.fused_qkv import order_by_kv_head
from baton_engine.layers.linear import Linear
from baton_engine.source import Source

from .gpt_neox import read_neox_rope
from .layer_norm_llama import LayerNormConfig, LayerNormLlama, PlainMlpLayer
from .llama import Defaults, LlamaConfig, fused_qkv, llama_fields, read_llama_config


class GptNeoXJapaneseLayer(PlainMlpLayer):
    blocks = ("attention", "mlp")
    output = "dense"
    projections = ("dense_h_to_4h", "dense_4h_to_h")

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        attention = super().make_attention(config, source, layer, rotary)
        if layer < config.num_layers - 1:
            return attention
        # The last layer alone has a bias, which is added once and not by each rank.
        bias = source.take("dense_bias", (config.hidden_size,))
        return lambda x, ctx: attention(x, ctx) + bias

    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        order = order_by_kv_head(config.num_heads, config.num_kv_heads, config.head_dim)
        return fused_qkv(config, source, "query_key_value", order)


class GptNeoXJapanese(LayerNormLlama):
    layer = GptNeoXJapaneseLayer
    embedding_name, final_norm, head_name = "embed_in", "final_layer_norm", "embed_out"

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("gpt_neox_japanese"), source

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = llama_fields(
            file, hidden_size=("hidden_size", 2560), num_hidden_layers=("num_hidden_layers", 32),
            num_attention_heads=("num_attention_heads", 32),
        )  # fmt: skip
        inner = file.count("hidden_size") * file.count("intermediate_multiple_size", 4)
        return read_llama_config(
            LayerNormConfig,
            ConfigFile({"vocab_size": 32000, **file.fields, "intermediate_size": inner}),
            Defaults(2048, tie_word_embeddings=True),
            eps=file.number("layer_norm_eps", 1e-5),
            rope=read_neox_rope(file, file.count("max_position_embeddings", 2048), 1.0),
            activation="gelu",
        )
