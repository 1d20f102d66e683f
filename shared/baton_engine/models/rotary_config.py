"""The config of models that rotate queries and keys in the same way in all layers."""

from typing import Any, Self

import msgspec

from baton_engine.layers.rope import Rope
from baton_engine.model_config import ModelConfig


class RotaryConfig(ModelConfig, frozen=True, kw_only=True):
    rope: Rope

    def layout(self) -> dict[str, Any]:
        return {**super().layout(), "rope": self.rope.layout}

    def limited(self, max_positions: int) -> Self:
        return msgspec.structs.replace(self, rope=self.rope.limited(max_positions))
