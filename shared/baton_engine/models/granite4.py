"""Granite 4 (IBM, 2025): Granite with or without experts, and maybe without rotation, of which some layers may be those
of Mamba 2."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.recurrence import Mamba
from baton_engine.shard import Rows
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape

from .granite import Granite, GraniteConfig, read_granite_config
from .granitemoe import GraniteMoeConfig, GraniteMoeLayer, read_granite_moe_config, shared_mlp
from .llama import LlamaConfig
from .recurrent_states import StateOrAttention, WithStates, read_mamba, state_windows
from .rotary_config import MaybeRotates

# The names in config.json of layers with attention and of those with a recurrent state, of which there are two each.
_ATTENTION = ("attention", "full_attention")
_RECURRENT = ("mamba", "linear_attention")


class Granite4Config(WithStates, MaybeRotates, GraniteConfig, frozen=True, kw_only=True):
    rotates: bool
    state_layers: frozenset[int]
    states: StateShape | None
    mamba: Mamba | None


class Granite4MoeConfig(WithStates, MaybeRotates, GraniteMoeConfig, frozen=True, kw_only=True):
    rotates: bool
    state_layers: frozenset[int]
    states: StateShape | None
    mamba: Mamba | None


class Granite4Layer(StateOrAttention, GraniteMoeLayer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        if isinstance(config, GraniteMoeConfig):
            return super().make_mlp(config, source, layer)
        return shared_mlp(config, source, config.intermediate_size, Rows(source.ranks))


class Granite4(Granite):
    layer = Granite4Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file, layers = file.with_defaults({"shared_intermediate_size": 1024}), file.count("num_hidden_layers")
        kinds = file.layer_types("layer_types", layers, (*_ATTENTION, *_RECURRENT)) or ["mamba"] * layers
        state_layers = frozenset(layer for layer, kind in enumerate(kinds) if kind in _RECURRENT)
        kv_heads = file.count("num_key_value_heads", file.count("num_attention_heads"))
        shape, fields = read_mamba(file, kv_heads) if state_layers else (None, None)
        facts = {
            "rotates": file.choice("position_embedding_type", "nope", ("nope", "rope")) == "rope",
            "windows": state_windows(state_layers, layers), "state_layers": state_layers, "states": shape,
            "mamba": fields,
        }  # fmt: skip
        if file.integer("num_local_experts", 8):
            return read_granite_moe_config(Granite4MoeConfig, file, **facts)
        dense = ConfigFile({**file.fields, "intermediate_size": file.count("shared_intermediate_size")})
        return read_granite_config(Granite4Config, dense, **facts)
