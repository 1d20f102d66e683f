"""Doge (Shi et al., 2025): Llama with norms of query and key heads, biases of scores that values decide, and factors of
the residual.

Beyond keep_window_size tokens each query would see only as many keys, those with the largest biases. That is not
served. Up to that length all keys are seen.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.key_biases import KeyBiases, widened
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rope import fraction_of, read_rope
from baton_engine.shard import Heads
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .sliding_windows import same_window

_CONTEXT = 2048


class DogeConfig(LlamaConfig, frozen=True, kw_only=True):
    """head_dim: with the elements that carry biases. value_dim: without them, as checkpoints have it."""

    value_dim: int


class DogeLayer(LlamaLayer):
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        super().__init__(config, source, layer, rotary)
        size = (config.hidden_size,)
        self.factors = source.take("input_residual", size), source.take("post_attention_residual", size)

    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.value_dim, config.hidden_size
        names, sizes = ["q_proj", "k_proj", "v_proj"], [heads * dim, kv_heads * dim, kv_heads * dim]
        qkv = Linear(source, names, sizes, hidden, bias=config.qkv_bias, shard=Heads(source.ranks, dim))
        q_norm, k_norm = (RmsNorm(source.at(name), dim, config.rms_norm_eps) for name in self.head_norms)
        return KeyBiases(source, qkv, (q_norm, k_norm), heads, kv_heads, hidden, dim, bias=config.qkv_bias)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_norm.add(x, residual)
        x = self.attention(normed, ctx)
        normed, residual = self.post_attention_norm.add(x, residual * self.factors[0])
        return self.mlp(normed), residual * self.factors[1]


class Doge(Llama):
    layer = DogeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # The router of its experts mixes tokens of a prompt.
        file.require_absent("is_moe", False)
        context = file.count("max_position_embeddings", _CONTEXT)
        context = min(context, file.count("keep_window_size", 2048))
        heads = file.count("num_attention_heads")
        dim, bias = file.count("head_dim", file.count("hidden_size") // heads), file.flag("attention_bias")
        if dim % 2:
            raise ConfigError(f"head_dim is {dim}; it must be even")
        rope = msgspec.structs.replace(read_rope(file, context), partial=fraction_of(dim, widened(dim)))
        return read_llama_config(
            DogeConfig,
            ConfigFile({**file.fields, "head_dim": widened(dim), "max_position_embeddings": context}),
            Defaults(_CONTEXT),
            same_window(file),
            scale=dim**-0.5,
            rope=rope,
            value_dim=dim,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias"),
        )
