"""Jamba (AI21 Labs, 2024): Mamba 1 in place of attention in most layers, no rotation, and experts in some layers."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.experts import ExpertMlp, Router, load_experts
from baton_engine.layers.mamba1 import Mamba1, Mamba1Fields
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rope import Rope
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing
from baton_kernels.reference.selective_scan import ChannelShape

from .llama import SILU, Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .qwen2_moe import NAMES
from .recurrent_states import Mamba1Names, StateOrAttention, WithStates, read_mamba1, state_windows
from .sparse_config import SparseConfig, read_experts_per_token
from .unrotated import NO_ROPE

_NAMES = Mamba1Names("mamba_d_state", "mamba_d_conv", "mamba_dt_rank", "mamba_proj_bias", "mamba_conv_bias")


class WithMamba1(WithStates):
    """A part of the config, with experts or without: nothing is rotated."""

    def rope_of(self, layer: int) -> Rope | None:
        return None


class JambaConfig(WithMamba1, LlamaConfig, frozen=True, kw_only=True):
    state_layers: frozenset[int]
    states: ChannelShape | None
    mamba: Mamba1Fields


class JambaMoeConfig(WithMamba1, SparseConfig, frozen=True, kw_only=True):
    state_layers: frozenset[int]
    states: ChannelShape | None
    mamba: Mamba1Fields


class JambaLayer(StateOrAttention, LlamaLayer):
    blocks = ("self_attn", "feed_forward")
    norms = ("input_layernorm", "pre_ff_layernorm")

    def make_state(self, config: Any, source: Source, layer: int) -> Mamba1:
        shape, how, eps = config.states, config.mamba, config.rms_norm_eps
        sizes = {"dt_layernorm": how.rank, "b_layernorm": shape.state, "c_layernorm": shape.state}
        norms = [RmsNorm(source.at(name), size, eps) for name, size in sizes.items()]
        return Mamba1(source, layer, shape, how, config.hidden_size, norms)

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        if not isinstance(config, JambaMoeConfig) or layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        source, count, hidden = self.block(source, 1), config.num_experts, config.hidden_size
        held = load_experts(source.at("experts"), NAMES.gated(config.activation), count, hidden, config.expert_size)
        return ExpertMlp(Router(source.at("router"), config.routing, count, hidden), held, source.ranks)


class Jamba(Llama):
    layer = JambaLayer
    final_norm = "final_layernorm"

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", 16)
        # Without these norms, which the authors' own configuration class made optional, it is another model.
        file.require_absent("mamba_inner_layernorms", True)
        state_layers = frozenset(range(layers)) - _every(file, "attn_layer", 8, 4)
        sparse_layers = _every(file, "expert_layer", 2, 1) if experts > 1 else frozenset()
        channels = file.count("mamba_expand", 2) * file.count("hidden_size")
        shape, fields = read_mamba1(file, _NAMES, file.count("num_key_value_heads", 8), channels)
        defaults = Defaults(262_144, num_kv_heads=8)
        facts: dict[str, Any] = {
            "windows": state_windows(state_layers, layers), "rope": NO_ROPE, "activations": SILU,
            "state_layers": state_layers, "states": shape if state_layers else None, "mamba": fields,
        }  # fmt: skip
        if not sparse_layers:
            return read_llama_config(JambaConfig, file, defaults, **facts)
        return read_llama_config(
            JambaMoeConfig,
            file,
            defaults,
            **facts,
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            routing=Routing(read_experts_per_token(file, experts, 2)),
            dense_layers=frozenset(range(layers)) - sparse_layers,
        )


def _every(file: ConfigFile, name: str, period: int, offset: int) -> frozenset[int]:
    """Return the layers of a kind, one in each period. period, offset: the defaults of both fields."""
    period, offset = file.count(f"{name}_period", period), file.integer(f"{name}_offset", offset)
    if offset >= period:
        raise ConfigError(f"{name}_offset in config.json is {offset}; it must be less than {name}_period, {period}")
    return frozenset(range(offset, file.count("num_hidden_layers"), period))
