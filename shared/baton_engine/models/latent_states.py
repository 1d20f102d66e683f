"""Models of which some layers have the gated delta rule with a decay for each element of a key, and the others latent
attention."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.latent_spec import LatentSpec
from baton_engine.layers.recurrence import Delta, DeltaInputs, GatedDelta
from baton_engine.shard import Place
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape

from .deepseek_v2 import DeepseekConfig, DeepseekLayer, read_deepseek_config
from .llama import LlamaConfig
from .recurrent_states import WithStates, check_length, state_windows

# Names of fields in config.json, and those that DeepSeek's configs have for them.
_NAMES = {
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob", "num_expert_group": "n_group",
    "num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}  # fmt: skip


class WithLatentStates(WithStates):
    """A part of the config of such a model. least: as in Delta."""

    states: StateShape | None
    least: float

    def states_of(self, ranks: Place) -> StateShape | None:
        # The cache of each rank holds the latents of all heads, and so it holds all states, too.
        return self.states


class LatentStatesConfig(WithLatentStates, DeepseekConfig, frozen=True, kw_only=True):
    """least: as in Delta."""

    state_layers: frozenset[int]
    states: StateShape | None
    least: float


class LatentStatesLayer(DeepseekLayer):
    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, WithLatentStates)
        if layer not in config.state_layers:
            return super().make_attention(config, source, layer, rotary)
        assert config.states is not None
        source, names = source.whole(), tuple(f"{part}_conv1d" for part in "qkv")
        # transformers keeps some tensors of GLM-5.3-Flash in other places than checkpoints do.
        names = ("conv1d",) if "conv1d.weight" in source else names
        how = Delta(
            names, "o_norm", self.output, torch.sigmoid, by_element=True, least=config.least,
            decay=self.decay_names(source),
        )  # fmt: skip
        compute = self.delta_inputs(config.states, source, config.hidden_size)
        return GatedDelta(source, layer, compute, config.states, how, config.hidden_size, config.rms_norm_eps)

    def decay_names(self, source: Source) -> str:
        """Return what the names of the decay's tensors begin with."""
        return ""

    def delta_inputs(self, shape: StateShape, source: Source, hidden: int) -> DeltaInputs:
        """Return what computes the inputs of a layer with the delta rule."""
        raise NotImplementedError


def read_latent_states(
    file: ConfigFile, state_layers: frozenset[int], heads: int, dim: int, length: int, dense_layers: frozenset[int],
    least: float = 0.0,
) -> LatentStatesConfig:  # fmt: skip
    """Return the config of a config.json with such layers.

    file: with DeepSeek's names for fields. heads, dim, length: of the delta rule and its convolution. dense_layers: as
    in SparseConfig. least: as in Delta.
    """
    check_length(length, "the length of the convolution")
    config = read_deepseek_config(
        file, {}, chosen=8, dense_layers=dense_layers, corrected=True, sigmoid=True,
        normalize=file.flag("norm_topk_prob", True), group_best=2,
    )  # fmt: skip
    specs = specs_with_states(config.latent, state_layers, config.num_layers)
    fields = msgspec.structs.asdict(config) | {"attention": specs}
    states = StateShape(1, heads, heads, dim, dim, length) if state_layers else None
    return LatentStatesConfig(**fields, state_layers=state_layers, states=states, least=least)


def specs_with_states(latent: LatentSpec, state_layers: frozenset[int], layers: int) -> tuple[AttentionSpec, ...]:
    """Return the specs of all layers. latent: that of layers with attention."""
    states = AttentionSpec(scale=latent.scale)
    windows = state_windows(state_layers, layers)
    return tuple(latent if window is None else msgspec.structs.replace(states, window=window) for window in windows)


def with_deepseek_names(file: ConfigFile) -> ConfigFile:
    """Return a config.json with DeepSeek's names for fields, of which both kinds are read."""
    given = {name: file.fields[own] for own, name in _NAMES.items() if file.fields.get(own) is not None}
    return ConfigFile({**file.fields, **given})
