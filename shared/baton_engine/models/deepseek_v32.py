"""DeepSeek-V3.2 (DeepSeek-AI, "DeepSeek-V3.2", 2025): DeepSeek-V3 with attention over the tokens that an indexer
selects."""

from typing import Any

import msgspec
import torch

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.latent_spec import IndexedLatentSpec, LatentSpec
from baton_engine.layers.indexer import Indexer, Selector
from baton_engine.source import Source

from .deepseek_v2 import DeepseekConfig, DeepseekLayer, read_deepseek_config
from .deepseek_v3 import DEFAULTS, DeepseekV3
from .llama import LlamaConfig
from .sparse_config import read_layers_without_experts


class IndexedConfig(DeepseekConfig, frozen=True, kw_only=True):
    """latent: with the indexer's sizes. selecting: the layers that have an indexer. Each other layer attends to the
    tokens that the last of these before it has selected. index_interleaved: as `interleaved`, for the indexer."""

    latent: IndexedLatentSpec
    selecting: frozenset[int]
    index_interleaved: bool

    @property
    def projections(self) -> list[tuple[int, int]]:
        spec = self.latent
        queries = spec.index_heads * spec.index_dim, self.low_rank or self.hidden_size
        return [*super().projections, queries, (spec.index_dim + spec.index_heads, self.hidden_size)]

    def attention_lengths(self, longest: int) -> list[int]:
        return sorted({min(self.latent.selected, longest), longest})

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "index": self.latent.index_dim}

    def kv_layout(self, dtype: str) -> KvLayout:
        # Layers without an indexer leave their part of the second plane unused, since all layers have the same planes.
        layout = super().kv_layout(dtype)
        return msgspec.structs.replace(
            layout, planes=(*layout.planes, Plane("index", 1, self.latent.index_row, dtype))
        )  # fmt: skip


class IndexedLayer(DeepseekLayer):
    def make_indexer(
        self, config: DeepseekConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> Selector | None:
        assert isinstance(config, IndexedConfig)
        if not has_indexer(config, source, layer):
            return None
        assert config.low_rank is not None
        return Indexer(
            source.at("indexer"), layer, config.latent, hidden=config.hidden_size, low_rank=config.low_rank,
            rotary=rotary, interleaved=config.index_interleaved,
        )  # fmt: skip


def has_indexer(config: IndexedConfig, source: Source, layer: int) -> bool:
    """Return whether a layer has an indexer. Raises ConfigError if no layer up to this one has one in a stage of a
    pipeline."""
    first = source.stage.layers(config.num_layers).start
    if config.selecting.isdisjoint(range(first, layer + 1)):
        raise ConfigError(
            f"--pipeline-parallel divides the layers of this model before layer {layer}, which attends to the "
            "tokens that an earlier layer selects: use another number of stages, or --tensor-parallel"
        )
    return layer in config.selecting


class DeepseekV32(DeepseekV3):
    layer = IndexedLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_indexed_config(
            file, {**DEFAULTS, "max_position_embeddings": 163840}, index_heads=64, index_interleaved=False
        )


def read_indexed_config(
    file: ConfigFile, defaults: dict[str, Any], *, index_heads: int, index_interleaved: bool,
    selecting: frozenset[int] | None = None, **how: Any,
) -> IndexedConfig:  # fmt: skip
    """Return the config of a config.json with DeepSeek-V3.2's fields.

    defaults: of fields that are absent. index_heads, index_interleaved: the family's defaults. selecting: None = all
    layers. how: as in read_deepseek_config.
    """
    file.choice("scoring_func", "sigmoid", ("sigmoid",))
    file.choice("topk_method", "noaux_tc", ("noaux_tc",))
    layers = file.count("num_hidden_layers")
    # In transformers these families have no projection from the hidden state to queries, so q_lora_rank has a default.
    given = ConfigFile({**file.fields, "q_lora_rank": file.count("q_lora_rank", defaults["q_lora_rank"])})
    named = file.fields.get("mlp_layer_types") is not None
    config = read_deepseek_config(
        given, defaults, chosen=8, dense_layers=read_layers_without_experts(file, layers, 3) if named else None,
        corrected=True, sigmoid=True, normalize=file.flag("norm_topk_prob", True), group_best=2, **how,
    )  # fmt: skip
    spec = indexed_spec(file, config.latent, index_heads)
    changed = {"latent": spec, "attention": (spec,) * layers}
    return IndexedConfig(
        **{**msgspec.structs.asdict(config), **changed},
        selecting=frozenset(range(layers)) if selecting is None else selecting,
        index_interleaved=file.flag("indexer_rope_interleave", index_interleaved),
    )


def indexed_spec(file: ConfigFile, latent: LatentSpec, index_heads: int) -> IndexedLatentSpec:
    """Return latent attention with the indexer of a config.json. index_heads: the family's default."""
    dim = file.count("index_head_dim", 128)
    if dim % 2 or dim < latent.rope_dim:
        raise ConfigError(
            f"index_head_dim in config.json is {dim}; it must be even and at least {latent.rope_dim}, the "
            "qk_rope_head_dim"
        )
    return IndexedLatentSpec(
        **msgspec.structs.asdict(latent), selected=file.count("index_topk", 2048), index_dim=dim,
        index_heads=file.count("index_n_heads", index_heads),
    )  # fmt: skip
