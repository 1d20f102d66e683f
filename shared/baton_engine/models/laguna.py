"""Laguna (poolside, 2026): layers with different numbers of query heads, gates of attention, windows with a rope of
their own, and experts chosen by sigmoids beside one that all tokens use."""

from collections.abc import Callable
from typing import Any, Self

import msgspec
import torch
from torch.nn import functional

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.rope import Rope
from baton_engine.shard import Place, head_part
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .deepseek_experts import DeepseekExpertsLayer
from .gated_layer import GatedLayer
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sliding_windows import WithWindowRope, partial_rope
from .sparse_config import SparseConfig, read_dense_layers, read_experts_per_token, read_layers_without_experts

_CONTEXT = 131072
# Those of transformers' configuration class.
_DEFAULTS = {
    "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
    "num_attention_heads": 48,
    "rope_parameters": {
        "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, "sliding_attention": {"rope_theta": 1e4},
    },
}  # fmt: skip
# The values with which transformers computes every model of the family.
_GIVEN = {"moe_apply_router_weight_on_input": False, "norm_topk_prob": True, "swa_attention_sink_enabled": False}


class LagunaConfig(WithWindowRope, SparseConfig, frozen=True, kw_only=True):
    """heads: the query heads of each layer. num_heads: the most of them. gates_of_head: as in GatedLayer."""

    window_rope: Rope
    heads: tuple[int, ...]
    gates_of_head: int

    def of_layer(self, layer: int) -> Self:
        """Return the config with the heads and the rope of a layer as those of all. Raises ConfigError if they do not
        fit the key-value heads or the dim of a head."""
        return msgspec.structs.replace(self, num_heads=self.heads[layer], rope=self.rope_of(layer))

    @property
    def query_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((heads, self.head_dim) for heads in sorted(set(self.heads)))

    @property
    def attention_weights(self) -> int:
        """As in ModelConfig, on average over layers."""
        gates = self.gates_of_head * sum(self.heads) * self.hidden_size
        each = (self.of_layer(layer).projections for layer in range(self.num_layers))
        return (sum(outputs * inputs for layer in each for outputs, inputs in layer) + gates) // self.num_layers

    def pair_operations(self, decode: bool) -> int:
        return 4 * sum(self.heads) * self.head_dim // self.num_layers

    def part(self, ranks: Place) -> Self:
        if min(self.heads) < ranks.count:
            raise ConfigError(f"--tensor-parallel {ranks.count} is more than the {min(self.heads)} heads of a layer")
        parts = (head_part(heads, ranks, "attention heads") for heads in self.heads)
        fewer = msgspec.structs.replace(self, heads=tuple(part.stop - part.start for part in parts))
        return super(LagunaConfig, fewer).part(ranks)

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "heads": list(self.heads)}


class LagunaLayer(GatedLayer, DeepseekExpertsLayer):
    gate = "g_proj"
    gate_activation: Callable[[torch.Tensor], torch.Tensor] = staticmethod(functional.softplus)
    shared = "shared_expert"

    def gates_of_head(self, config: LlamaConfig) -> int:
        assert isinstance(config, LagunaConfig)
        return config.gates_of_head

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, LagunaConfig)
        return super().make_attention(config.of_layer(layer), source, layer, rotary)

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return source.take("experts.e_score_correction_bias", (config.num_experts,), dtype=torch.float32)


class Laguna(Llama):
    layer = LagunaLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        for name, value in _GIVEN.items():
            file.require_absent(name, value)
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", 256)
        bias, window = file.flag("attention_bias"), file.count("sliding_window", 512)
        types = file.layer_types("layer_types", layers) or ["full_attention"] * layers
        rope, window_rope = _ropes(file, types)
        heads, dim = _heads(file, layers), file.count("head_dim", 128)
        config = read_llama_config(
            LagunaConfig,
            ConfigFile({**file.fields, "num_attention_heads": max(heads), "head_dim": dim}),
            Defaults(_CONTEXT, num_kv_heads=8),
            tuple(window if kind == "sliding_attention" else None for kind in types),
            rope=rope,
            window_rope=window_rope,
            heads=heads,
            gates_of_head=dim if _gating(file, layers) == "per-element" else 1,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size", 512),
            routing=Routing(
                read_experts_per_token(file, experts, 8), sigmoid=True, normalize=True,
                scale=file.number("moe_routed_scaling_factor", 1.0),
                softcap=max(file.number("moe_router_logit_softcapping", 0.0), 0.0),
            ),
            shared_size=file.integer("shared_expert_intermediate_size", 512),
            dense_layers=_dense_layers(file, layers),
        )  # fmt: skip
        # This raises ConfigError for a layer whose heads do not fit.
        for layer in range(layers):
            config.of_layer(layer)
        return config


def _gating(file: ConfigFile, layers: int) -> str:
    """Return whether gates are per-head or per-element."""
    gating = file.fields.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise ConfigError(f"gating in config.json is {gating!r}; it must be true, 'per-head' or 'per-element'")
    gating = "per-head" if gating is True else str(gating)
    # The authors' own code reads it for each layer.
    file.require_absent("gating_types", [gating] * layers, [gating.replace("-", "_")] * layers)
    return gating


def _heads(file: ConfigFile, layers: int) -> tuple[int, ...]:
    """Return the query heads of each layer."""
    heads = file.integers("num_attention_heads_per_layer") or [file.count("num_attention_heads")] * layers
    if len(heads) != layers or not all(heads):
        raise ConfigError(
            f"num_attention_heads_per_layer in config.json is {heads}; it must be a list of integers of at least 1, "
            f"one for each of {layers} layers"
        )
    return tuple(heads)


def _dense_layers(file: ConfigFile, layers: int) -> frozenset[int]:
    """Return the layers without experts. Configs of the authors' own code name them as Qwen's do."""
    if "mlp_layer_types" not in file.fields and "mlp_only_layers" in file.fields:
        return read_dense_layers(file, layers)
    return read_layers_without_experts(file, layers, 1)


def _ropes(file: ConfigFile, types: list[str]) -> tuple[Rope, Rope]:
    """Return the rotations of layers without and with a window. types: the kinds of layers."""
    given, context = file.part("rope_parameters"), file.count("max_position_embeddings", _CONTEXT)
    ropes = []
    for kind, theta in (("full_attention", 5e5), ("sliding_attention", 1e4)):
        own = given.part(kind)
        if kind in types and own.fields.get("rope_theta") is None:
            raise ConfigError(f"rope_parameters in config.json has no rope_theta of {kind}")
        ropes.append(partial_rope(own, theta, context, file))
    return ropes[0], ropes[1]
