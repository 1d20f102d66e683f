"""Models of which some layers have the gated delta rule with a decay for each element of a key, and the others latent
attention."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
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


class LatentStatesConfig(WithStates, DeepseekConfig, frozen=True, kw_only=True):
    """least: as in Delta."""

    state_layers: frozenset[int]
    states: StateShape | None
    least: float

    def states_of(self, ranks: Place) -> StateShape | None:
        # The cache of each rank holds the latents of all heads, and so it holds all states, too.
        return self.states


class LatentStatesLayer(DeepseekLayer):
    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, LatentStatesConfig)
        if layer not in config.state_layers:
            return super().make_attention(config, source, layer, rotary)
        assert config.states is not None
        source, names = source.whole(), tuple(f"{part}_conv1d" for part in "qkv")
        how = Delta(names, "o_norm", self.output, torch.sigmoid, by_element=True, least=config.least)
        compute = self.delta_inputs(config.states, source, config.hidden_size)
        return GatedDelta(source, layer, compute, config.states, how, config.hidden_size, config.rms_norm_eps)

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
    windows = state_windows(state_layers, config.num_layers)
    states_only = AttentionSpec(scale=config.latent.scale)
    specs = tuple(
        config.latent if window is None else msgspec.structs.replace(states_only, window=window) for window in windows
    )
    fields = msgspec.structs.asdict(config) | {"attention": specs}
    states = StateShape(1, heads, heads, dim, dim, length) if state_layers else None
    return LatentStatesConfig(**fields, state_layers=state_layers, states=states, least=least)


def with_deepseek_names(file: ConfigFile) -> ConfigFile:
    """Return a config.json with DeepSeek's names for fields, of which both kinds are read."""
    given = {name: file.fields[own] for own, name in _NAMES.items() if file.fields.get(own) is not None}
    return ConfigFile({**file.fields, **given})
