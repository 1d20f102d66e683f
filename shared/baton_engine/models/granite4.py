"""Granite 4 without recurrent layers (IBM, 2025): Granite with or without experts, and maybe without rotation."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope
from baton_engine.shard import Rows
from baton_engine.source import Source

from .granite import Granite, GraniteConfig, read_granite_config
from .granitemoe import GraniteMoeConfig, GraniteMoeLayer, read_granite_moe_config, shared_mlp
from .llama import LlamaConfig

# The names in config.json of layers with attention and of those with a recurrent state, of which there are two each.
_ATTENTION = ("attention", "full_attention")
_RECURRENT = ("mamba", "linear_attention")


class MaybeRotates:
    """A part of the config of a model whose layers rotate queries and keys all or not at all."""

    rope: Rope
    rotates: bool

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if self.rotates else None

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "rotates": self.rotates}  # type: ignore[misc]


class Granite4Config(MaybeRotates, GraniteConfig, frozen=True, kw_only=True):
    rotates: bool


class Granite4MoeConfig(MaybeRotates, GraniteMoeConfig, frozen=True, kw_only=True):
    rotates: bool


class Granite4Layer(GraniteMoeLayer):
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
        recurrent = sum(kind in _RECURRENT for kind in kinds)
        if recurrent:
            raise ConfigError(
                f"{recurrent} of {layers} layers have a recurrent state (Mamba), and Baton serves {file.architecture} "
                "with attention in all layers only"
            )
        position = file.choice("position_embedding_type", "nope", ("nope", "rope"))
        if file.integer("num_local_experts", 8):
            return read_granite_moe_config(Granite4MoeConfig, file, rotates=position == "rope")
        dense = ConfigFile({**file.fields, "intermediate_size": file.count("shared_intermediate_size")})
        return read_granite_config(Granite4Config, dense, rotates=position == "rope")
