"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Llama with Mamba 2 in place of attention in most layers."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.recurrence import Mamba
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .recurrent_states import WithStates, mamba, read_mamba, state_windows


class BambaConfig(WithStates, LlamaConfig, frozen=True, kw_only=True):
    state_layers: frozenset[int]
    states: StateShape | None
    mamba: Mamba


class BambaLayer(LlamaLayer):
    blocks = (None, "feed_forward")
    norms = ("input_layernorm", "pre_ff_layernorm")

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, BambaConfig)
        if layer in config.state_layers:
            return mamba(config, source.at("mamba"), layer)
        return super().make_attention(config, source.at("self_attn"), layer, rotary)


class Bamba(Llama):
    layer = BambaLayer
    final_norm = "final_layernorm"

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, context = file.count("num_hidden_layers"), file.count("max_position_embeddings", 262_144)
        state_layers = frozenset(range(layers)) - set(file.integers("attn_layer_indices"))
        shape, fields = read_mamba(file, file.count("num_key_value_heads", 8))
        bias = file.flag("attention_bias")
        return read_llama_config(
            BambaConfig,
            file,
            Defaults(context, num_kv_heads=8, rms_norm_eps=1e-5),
            state_windows(state_layers, layers),
            rope=read_rope(file, context, 0.5),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias"),
            state_layers=state_layers,
            states=shape if state_layers else None,
            mamba=fields,
        )
