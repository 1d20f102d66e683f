"""The text part of dots3-note (dots studio, 2026): latent attention with gates, over the tokens that an indexer selects
or in layers with other sizes over a window.

The layer for multi-token prediction is not read.
"""

from collections.abc import Callable
from typing import Any, Self

import msgspec
import torch

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.latent_spec import IndexedLatentSpec, LatentSpec
from baton_engine.layers.gated_latents import NormedGatedLatents
from baton_engine.layers.indexer import Indexer
from baton_engine.layers.rope import Rope
from baton_engine.shard import Place, head_part
from baton_engine.source import Source

from .deepseek_v2 import DeepseekConfig, DeepseekLayer, read_deepseek_config
from .dots3_note_kinds import DEFAULTS, LatentKind, read_kinds
from .llama import Llama, LlamaConfig
from .sparse_config import read_layers_between_experts, read_layers_without_experts

# The values with which every model of the family is computed.
_GIVEN: dict[str, Any] = {
    "apply_mla_qkv_lora_rescale": True, "attention_gate_type": "headwise", "indexer_rope_interleave": True,
    "k_rope_only_layernorm": True, "multi_latent_attention": True, "qk_layernorm": True, "rope_interleave": True,
    "swa_attention_gate_type": "headwise", "topk_method": "noaux_tc",
}  # fmt: skip


class Dots3NoteConfig(DeepseekConfig, frozen=True, kw_only=True):
    """kinds: the attention of each layer. num_heads: the most heads of a layer. latent, low_rank, rope, latent_scale:
    of the first layer."""

    kinds: tuple[LatentKind, ...]

    def of_layer(self, layer: int) -> Self:
        """Return the config with the attention of a layer as that of all."""
        kind = self.kinds[layer]
        return msgspec.structs.replace(
            self, num_heads=kind.heads, head_dim=kind.latent.query_dim, latent=kind.latent, low_rank=kind.low_rank,
            rope=kind.rope, latent_scale=kind.latent_scale,
        )  # fmt: skip

    def rope_of(self, layer: int) -> Rope:
        return self.kinds[layer].rope

    @property
    def head_dims(self) -> tuple[int, ...]:
        return tuple({kind.latent.query_dim: None for kind in self.kinds})

    @property
    def query_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple({(kind.heads, kind.latent.query_dim): None for kind in self.kinds})

    @property
    def attention_weights(self) -> int:
        """As in ModelConfig, on average over layers."""
        each = (self.of_layer(layer).projections for layer in range(self.num_layers))
        return sum(outputs * inputs for layer in each for outputs, inputs in layer) // self.num_layers

    @property
    def projections(self) -> list[tuple[int, int]]:
        spec, gates = self.latent, (self.num_heads, self.hidden_size)
        if not isinstance(spec, IndexedLatentSpec):
            return [*super().projections, gates]
        assert self.low_rank is not None
        queries = spec.index_heads * spec.index_dim, self.low_rank
        return [*super().projections, gates, queries, (spec.index_dim + spec.index_heads, self.hidden_size)]

    def pair_operations(self, decode: bool) -> int:
        """As in ModelConfig, on average over layers."""
        return sum(kind.heads * kind.latent.pair_operations(decode) for kind in self.kinds) // self.num_layers

    def attention_lengths(self, longest: int) -> list[int]:
        selected = {spec.selected for spec in self.attention if isinstance(spec, IndexedLatentSpec)}
        return sorted({longest, *(min(most, longest) for most in selected)})

    def limited(self, max_positions: int) -> Self:
        limited = super().limited(max_positions)
        kinds = (msgspec.structs.replace(kind, rope=kind.rope.limited(max_positions)) for kind in self.kinds)
        return msgspec.structs.replace(limited, kinds=tuple(kinds))

    def part(self, ranks: Place) -> Self:
        kinds = []
        for kind in self.kinds:
            heads = head_part(kind.heads, ranks, "attention heads")
            kinds.append(msgspec.structs.replace(kind, heads=heads.stop - heads.start))
        return msgspec.structs.replace(super().part(ranks), kinds=tuple(kinds))

    def fingerprint_facts(self) -> dict[str, Any]:
        kinds = [[*_elements(kind.latent), *kind.rope.layout] for kind in self.kinds]
        return {**super().fingerprint_facts(), "kinds": kinds}

    def kv_layout(self, dtype: str) -> KvLayout:
        layout, heads = super().kv_layout(dtype), [(1, *_elements(kind.latent)) for kind in self.kinds]
        latent, index = (max(dims) for dims in list(zip(*heads, strict=True))[1:])
        planes = [Plane("latent", 1, latent, dtype)]
        if index:
            # Layers without an indexer leave their part of this plane unused.
            planes.append(Plane("index", 1, index, dtype))
        own = tuple((1, dim, index)[: len(planes) + 1] for _, dim, _ in heads)
        return msgspec.structs.replace(layout, planes=tuple(planes), heads=own if len(set(own)) > 1 else ())


def _elements(spec: LatentSpec) -> tuple[int, int]:
    """Return the elements of a token's latent, and of its index key."""
    return spec.latent_dim, spec.index_dim if isinstance(spec, IndexedLatentSpec) else 0


class Dots3NoteLayer(DeepseekLayer):
    attention_class = NormedGatedLatents

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, Dots3NoteConfig)
        return super().make_attention(config.of_layer(layer), source, layer, rotary)

    def make_indexer(
        self, config: DeepseekConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> Indexer | None:
        if not isinstance(config.latent, IndexedLatentSpec):
            return None
        assert config.low_rank is not None
        # transformers multiplies these inputs by a constant above 0, which does not change what is selected.
        return Indexer(
            source.at("indexer"), layer, config.latent, hidden=config.hidden_size, low_rank=config.low_rank,
            rotary=rotary, interleaved=True,
        )  # fmt: skip


class Dots3Note(Llama):
    layer = Dots3NoteLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, value in _GIVEN.items():
            file.require_absent(name, value)
        # Early configs have the name of the method in place of the function.
        file.choice("scoring_func", "sigmoid", ("sigmoid", "noaux_tc"))
        given = file.with_defaults(DEFAULTS)
        kinds = read_kinds(given)
        first, heads = kinds[0], max(kind.heads for kind in kinds)
        shared = given.count("moe_shared_expert_intermediate_size", given.count("shared_experts_intermediate_size"))
        # Each kind has its own rope, and queries and keys have no factor beside that of its rotation.
        fields = {**given.fields, "num_attention_heads": heads, "rope_parameters": None, "rope_scaling": None}
        config = read_deepseek_config(
            ConfigFile({**fields, "n_shared_experts": given.count("n_shared_experts")}), {}, chosen=8,
            dense_layers=_read_dense_layers(given), corrected=True, sigmoid=True,
            normalize=given.flag("norm_topk_prob", True), group_best=2,
        )  # fmt: skip
        changed = {
            "attention": tuple(kind.latent for kind in kinds), "latent": first.latent, "low_rank": first.low_rank,
            "head_dim": first.latent.query_dim, "rope": first.rope, "latent_scale": first.latent_scale,
            "latent_eps": config.rms_norm_eps, "shared_size": given.count("n_shared_experts") * shared,
        }  # fmt: skip
        return Dots3NoteConfig(**{**msgspec.structs.asdict(config), **changed}, kinds=kinds)


def _read_dense_layers(file: ConfigFile) -> frozenset[int]:
    """Return the layers without experts, from a list of their kinds or from the first layer with experts and the
    distance between them, which may be a list of 0 and 1."""
    layers = file.count("num_hidden_layers")
    if file.fields.get("mlp_layer_types") is not None:
        return read_layers_without_experts(file, layers, 1)
    file = file.with_defaults({"first_k_dense_replace": 1})
    if not isinstance(file.fields.get("moe_layer_freq"), list):
        return read_layers_between_experts(file, layers)
    flags = file.integers("moe_layer_freq")
    if len(flags) != layers or max(flags) > 1:
        raise ConfigError(f"moe_layer_freq in config.json is {flags}; it must be 0 or 1 for each of {layers} layers")
    first = file.integer("first_k_dense_replace")
    return frozenset(layer for layer, sparse in enumerate(flags) if layer < first or not sparse)
