"""BitNet b1.58 (Ma et al., "BitNet b1.58 2B4T Technical Report", 2025): Llama with squared ReLUs, and norms before the
last projection of attention and of the MLP."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.linear import Linear
from baton_engine.layers.sub_norms import DividedNorm, SubNormAttention, SubNormMlp
from baton_engine.shard import Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config


class BitNetLayer(LlamaLayer):
    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        norm = DividedNorm(source.at("attn_sub_norm"), config.hidden_size, config.rms_norm_eps)
        output = self.attended(config, source)
        return SubNormAttention(norm, config, layer, source, self.qkv(config, source), output, rotary)

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        source, inner = source.at("mlp"), config.intermediate_size
        norm = DividedNorm(source.at("ffn_sub_norm"), inner, config.rms_norm_eps)
        down = Linear(source, ["down_proj"], [config.hidden_size], inner, shard=Rows(source.ranks))
        return SubNormMlp(self.gate_up(config, source), norm, down, ACTIVATIONS[config.activation])


class BitNet(Llama):
    layer = BitNetLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias = file.flag("attention_bias")
        config = read_llama_config(
            LlamaConfig,
            file,
            Defaults(2048, num_kv_heads=5, rms_norm_eps=1e-5, rope_theta=5e5),
            activation="relu2",
            qkv_bias=bias,
            output_bias=bias,
        )
        if config.num_heads * config.head_dim != config.hidden_size:
            raise ConfigError(
                f"head_dim in config.json is {config.head_dim}; for {config.num_heads} heads and hidden_size "
                f"{config.hidden_size} it must be {config.hidden_size // config.num_heads}"
            )
        return config
