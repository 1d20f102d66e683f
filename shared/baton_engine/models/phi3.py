"""Phi-3 and Phi-4 (Abdin et al., 2024): Llama with fused projections; Phi-4-mini rotates a part of each head."""

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.attention import Attention
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, read_llama_config


class Phi3Layer:
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = source.at("self_attn"), source.at("mlp")
        order = config.rope.order(config.num_heads, config.num_kv_heads, config.head_dim)
        qkv = Linear(attention, ["qkv_proj"], [q + 2 * kv], hidden, order=order)
        output = Linear(attention, ["o_proj"], [hidden], q)
        gate_up = Linear(mlp, ["gate_up_proj"], [2 * inner], hidden)
        down = Linear(mlp, ["down_proj"], [hidden], inner)
        self.input_norm = RmsNorm(source.at("input_layernorm"), hidden, eps)
        self.attention = Attention(config, layer, source.ops, qkv, output, rotary)
        self.post_attention_norm = RmsNorm(source.at("post_attention_layernorm"), hidden, eps)
        self.mlp = GatedMlp(gate_up, down, "silu")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, ctx)
        x, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(x), residual


class Phi3(Llama):
    layer = Phi3Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        window = None if file.fields.get("sliding_window") is None else file.count("sliding_window")
        context = file.count("max_position_embeddings", 4096)
        return read_llama_config(
            LlamaConfig,
            file,
            Defaults(4096, rms_norm_eps=1e-5),
            (window,) * file.count("num_hidden_layers"),
            rope=read_rope(file, context, partial=1.0),
        )
