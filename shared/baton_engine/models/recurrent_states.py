"""The config of models of which some layers have a recurrent state in place of attention."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self, cast

import msgspec
import torch

from baton_common.kv_layout import STATE_PLACES, KvLayout
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.mamba1 import Mamba1Fields
from baton_engine.layers.recurrence import Mamba, Mamba2
from baton_engine.shard import Place
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape
from baton_kernels.reference.selective_scan import ChannelShape

from .llama import LlamaConfig, LlamaLayer

# Of a layer with a state: it reads the state after the token before, which is in that token's block.
_WINDOW = 2
_INFINITE = {"__float__": "Infinity"}


class WithStates:
    """A part of the config of such a model. states: the heads or channels of these layers; None = there is no such
    layer."""

    num_kv_heads: int
    state_layers: frozenset[int]
    states: StateShape | ChannelShape | None

    @property
    def recent_tokens(self) -> int:
        return _WINDOW if self.state_layers else 1

    def kv_layout(self, dtype: str) -> KvLayout:
        whole: KvLayout = super().kv_layout(dtype)  # type: ignore[misc]
        if self.states is None:
            return whole
        # A group of states may have the places of several heads.
        groups = self.states.groups
        rows = self.states.rows([plane.heads * plane.head_bytes // groups for plane in whole.planes])
        return msgspec.structs.replace(whole, state_layers=tuple(sorted(self.state_layers)), state_rows=rows)

    def part(self, ranks: Place) -> Self:
        part: Any = super().part(ranks)  # type: ignore[misc]
        if self.states is None:
            return cast(Self, part)
        own: Self = msgspec.structs.replace(part, states=self.states_of(ranks))
        return own

    def states_of(self, ranks: Place) -> StateShape | ChannelShape | None:
        """Return what one rank has of the states. Raises ConfigError if they cannot be divided."""
        if self.num_kv_heads % ranks.count:
            raise ConfigError(
                f"--tensor-parallel {ranks.count} does not divide the {self.num_kv_heads} key-value heads, among which "
                "the states of other layers are divided"
            )
        if self.states is None:
            return None
        if self.states.groups % ranks.count:
            raise ConfigError(
                f"--tensor-parallel {ranks.count} does not divide the {self.states.groups} groups of Mamba's heads"
            )
        return self.states.part(ranks.count)

    def fingerprint_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = super().fingerprint_facts()  # type: ignore[misc]
        if self.states is None:
            return facts
        return {**facts, "state_layers": sorted(self.state_layers), "states": list(self.states)}


def read_delta(file: ConfigFile, kv_heads: int, layers: int) -> tuple[frozenset[int], StateShape]:
    """Return which layers have the gated delta rule, and its heads. Raises ConfigError for heads that Baton does not
    serve."""
    every = file.count("full_attention_interval", 4)
    default = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    kinds = file.layer_types("layer_types", layers, ("full_attention", "linear_attention")) or default
    shape = StateShape(
        groups=kv_heads,
        key_heads=file.count("linear_num_key_heads", 16),
        value_heads=file.count("linear_num_value_heads", 32),
        key_dim=file.count("linear_key_head_dim", 128),
        value_dim=file.count("linear_value_head_dim", 128),
        length=file.count("linear_conv_kernel_dim", 4),
    )
    if shape.key_heads % kv_heads or shape.value_heads % shape.key_heads:
        raise ConfigError(
            f"linear_num_key_heads in config.json is {shape.key_heads}; it must be a multiple of the {kv_heads} "
            f"key-value heads and divide the {shape.value_heads} value heads"
        )
    check_length(shape.length, "linear_conv_kernel_dim")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"), shape


def mamba(config: Any, source: Source, layer: int) -> Mamba2:
    """Return a layer of Mamba 2. config: with states and with `mamba`, a Mamba."""
    return Mamba2(source, layer, config.states, config.mamba, config.hidden_size, config.rms_norm_eps)


class StateOrAttention(LlamaLayer):
    """A layer with a state instead of attention where the config says so. state: the name of that block."""

    state = "mamba"

    def block(self, source: Source, index: int) -> Source:
        # The name of the first block depends on the layer.
        return super().block(source, index) if index else source

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, WithStates)
        if layer in config.state_layers:
            return self.make_state(config, source.at(self.state), layer)
        return super().make_attention(config, super().block(source, 0), layer, rotary)

    def make_state(self, config: Any, source: Source, layer: int) -> Callable[[Any, Context], torch.Tensor]:
        """Return what a layer has in place of attention. config: with states."""
        return mamba(config, source, layer)


def read_mamba(file: ConfigFile, kv_heads: int, inner: int | None = None) -> tuple[StateShape, Mamba]:
    """Return the heads of Mamba 2, in as many groups as divide the key-value heads, too, with a head of keys for each
    group, and what else config.json says of it.

    inner: elements of all values; None = mamba_expand times hidden_size. Raises ConfigError for heads that Baton does
    not serve.
    """
    groups, heads = file.count("mamba_n_groups", 1), file.count("mamba_n_heads", 128)
    inner = inner or file.count("mamba_expand", 2) * file.count("hidden_size")
    dim = inner // heads if file.fields.get("mamba_d_head", "auto") == "auto" else file.count("mamba_d_head")
    if heads * dim != inner:
        raise ConfigError(f"mamba_n_heads {heads} times mamba_d_head {dim} in config.json is not {inner}")
    parts = math.gcd(heads, kv_heads)
    key_heads = max(groups, parts)
    if heads % key_heads or key_heads % groups or key_heads % parts:
        raise ConfigError(
            f"mamba_n_heads in config.json is {heads}; it must be a multiple of the {groups} groups and of the {parts} "
            f"parts of the {kv_heads} key-value heads, one of which divides the other"
        )
    # The last is what transformers writes.
    file.require_absent("time_step_limit", *([0.0, limit] for limit in (math.inf, "Infinity", _INFINITE)))
    length = file.count("mamba_d_conv", 4)
    check_length(length, "mamba_d_conv")
    shape = StateShape(parts, key_heads, heads, file.count("mamba_d_state", 256), dim, length)
    bias = file.flag("mamba_proj_bias")
    return shape, Mamba(groups, bias, file.flag("mamba_conv_bias", True), bias)


class Mamba1Names(NamedTuple):
    """The names in config.json of what ChannelShape and Mamba1Fields call by these names."""

    state: str
    length: str
    rank: str
    bias: str
    conv_bias: str


def read_mamba1(
    file: ConfigFile, names: Mamba1Names, kv_heads: int, channels: int
) -> tuple[ChannelShape, Mamba1Fields]:  # fmt: skip
    """Return the channels of Mamba 1, which the key-value heads divide, and what else config.json says of it. Raises
    ConfigError for channels that Baton does not serve."""
    if channels % kv_heads:
        raise ConfigError(
            f"the {channels} channels of Mamba in config.json cannot be divided among {kv_heads} key-value heads"
        )
    length = file.count(names.length, 4)
    check_length(length, names.length)
    rank = math.ceil(file.count("hidden_size") / 16)
    if file.fields.get(names.rank) != "auto":
        rank = file.count(names.rank, rank)
    fields = Mamba1Fields(rank, file.flag(names.bias), file.flag(names.conv_bias, True))
    return ChannelShape(kv_heads, channels, file.count(names.state, 16), length), fields


def check_length(length: int, name: str) -> None:
    """Raise ConfigError unless the convolution has a length that is served."""
    if not 2 <= length <= STATE_PLACES + 1:
        raise ConfigError(f"{name} in config.json is {length}; it must be from 2 to {STATE_PLACES + 1}")


def state_windows(state_layers: frozenset[int], layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, as read_llama_config takes them."""
    return tuple(_WINDOW if layer in state_layers else None for layer in range(layers))
