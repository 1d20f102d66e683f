"""The config of models that rotate queries and keys in the same way in all layers, or not at all."""

from typing import Any, Self

import msgspec

from baton_engine.config import ConfigError
from baton_engine.layers.rope import Rope
from baton_engine.model_config import ModelConfig


class RotaryConfig(ModelConfig, frozen=True, kw_only=True):
    rope: Rope

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope.rotary_dim(self.head_dim) % 2:
            part = f"partial_rotary_factor {self.rope.partial} of heads of {self.head_dim}"
            raise ConfigError(f"{part} in config.json is not an even number")

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "rope": self.rope.layout}

    def limited(self, max_positions: int) -> Self:
        return msgspec.structs.replace(self, rope=self.rope.limited(max_positions))


class MaybeRotates:
    """A part of the config of a model whose layers rotate queries and keys all or not at all."""

    rope: Rope
    rotates: bool

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if self.rotates else None

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "rotates": self.rotates}  # type: ignore[misc]
