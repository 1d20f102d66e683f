"""Kimi Linear (Kimi Team, 2025): three of four layers have the gated delta rule with a decay for each element of a key,
the others DeepSeek's latent attention without rotation."""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import ExpertsMethod
from baton_engine.inputs import InputRows
from baton_engine.layers.experts import load_experts
from baton_engine.layers.linear import Linear
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape

from .latent_states import LatentStatesLayer, read_latent_states, with_deepseek_names
from .llama import Llama, LlamaConfig
from .mixtral import NAMES
from .sparse_config import SparseConfig, read_layers_without_experts

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 163_840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_attention_heads": 32, "max_position_embeddings": 1_048_576, "rms_norm_eps": 1e-5,
    "n_routed_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 2.446,
}  # fmt: skip
# What the published model has.
_GIVEN: dict[str, Any] = {
    "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "moe_layer_freq": 1,
}  # fmt: skip
# The fields of linear_attn_config, and those that transformers writes in its place, with their defaults.
_LINEAR = {
    "num_heads": ("linear_num_heads", 32), "head_dim": ("linear_head_dim", 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}  # fmt: skip


class LowRankInputs:
    """Computes gates and rates of the states from two vectors of a head's size. Implements DeltaInputs.

    rates: what the names of the projections to rates begin with.
    """

    def __init__(self, shape: StateShape, source: Source, hidden: int, rates: str = "") -> None:
        names = ["q_proj", "k_proj", "v_proj", "b_proj", f"{rates}f_a_proj", "g_a_proj"]
        sizes = [shape.keys, shape.keys, shape.values, shape.value_heads, shape.key_dim, shape.key_dim]
        self._first = Linear(source, names, sizes, hidden)
        self._sizes, self.inputs = [shape.channels, *sizes[3:]], self._first.inputs
        self._rates = Linear(source, [f"{rates}f_b_proj"], [shape.keys], shape.key_dim)
        self._gates = Linear(source, ["g_b_proj"], [shape.values], shape.key_dim)

    def __call__(self, x: InputRows) -> Sequence[torch.Tensor]:
        inputs, gates, for_rates, for_gates = torch.split(self._first(x), self._sizes, dim=1)
        return inputs, self._gates(for_gates.contiguous()), gates, self._rates(for_rates.contiguous())


class KimiLinearLayer(LatentStatesLayer):
    blocks = ("self_attn", "block_sparse_moe")

    def block(self, source: Source, index: int) -> Source:
        # The published checkpoint calls MLPs "mlp", and transformers calls them as it calls experts.
        inside = super().block(source, index)
        is_published = index == 1 and "gate.weight" not in inside and "gate_proj.weight" not in inside
        return source.at("mlp") if is_published else inside

    def delta_inputs(self, shape: StateShape, source: Source, hidden: int) -> LowRankInputs:
        return LowRankInputs(shape, source, hidden)

    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        return load_experts(source, NAMES, config.num_experts, config.hidden_size, config.expert_size)


class KimiLinear(Llama):
    layer = KimiLinearLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, value in _GIVEN.items():
            file.require_absent(name, value)
        file = with_deepseek_names(file).with_defaults(_DEFAULTS)
        layers, linear = file.count("num_hidden_layers"), file.part("linear_attn_config")
        heads, dim, length = (linear.count(name, file.count(*own)) for name, own in _LINEAR.items())
        dense = read_layers_without_experts(file, layers, 1)
        config = read_latent_states(file, _state_layers(file, linear, layers), heads, dim, length, dense)
        # No element of a query or key is rotated.
        return msgspec.structs.replace(config, rope=msgspec.structs.replace(config.rope, partial=0.0))


def _state_layers(file: ConfigFile, linear: ConfigFile, layers: int) -> frozenset[int]:
    """Return the layers with the delta rule. linear: the part of config.json that counts layers from 1."""
    kinds = file.layer_types("layer_types", layers, ("full_attention", "linear_attention"))
    if kinds is not None:
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    if "kda_layers" not in linear.fields:
        return frozenset(layer for layer in range(layers) if layer % 4 or not layer)
    states, full = (linear.integers(name) for name in ("kda_layers", "full_attn_layers"))
    if sorted(states + full) != list(range(1, layers + 1)):
        raise ConfigError(
            f"kda_layers and full_attn_layers in config.json must name each of the {layers} layers once, from 1 on"
        )
    return frozenset(layer - 1 for layer in states)
