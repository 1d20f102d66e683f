"""The facts about a model that the engine computes with, whatever its family."""

from typing import Any, Self

import msgspec

from baton_common.kv_layout import KvLayout, Plane

from .attention_spec import AttentionSpec
from .config import ConfigError


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer. Sizes are in elements. Each family adds what only its own layers need."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint
    eos_token_ids: tuple[int, ...]
    attention: tuple[AttentionSpec, ...]  # of each layer

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        # Rotations and their kernels work on pairs.
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; it must be even")

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The window of each layer, in tokens, the query's own included."""
        return tuple(spec.window for spec in self.attention)

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer that every token is multiplied with."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        return attention + 3 * self.hidden_size * self.intermediate_size

    def limited(self, max_positions: int) -> Self:
        """Return the facts for an engine whose sequences are never longer."""
        return self

    def layout(self) -> dict[str, Any]:
        """Return the facts that two engines must share for one to decode on the other's KV."""
        # Named one by one: a field that a later version adds must not keep it from working with an earlier one.
        facts = {
            "architecture": self.architecture,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            "sliding_windows": list(self.sliding_windows),
        }
        # Earlier versions hand over all tokens of layers with a window, and wait for all of them.
        return {**facts, "hands_over": "seen"} if any(self.sliding_windows) else facts

    def kv_layout(self, dtype: str) -> KvLayout:
        """Return what the model keeps of each token, in a cache of a dtype."""
        planes = (Plane(name, self.num_kv_heads, self.head_dim, dtype) for name in ("key", "value"))
        windows = self.sliding_windows if any(self.sliding_windows) else ()
        return KvLayout(self.num_layers, tuple(planes), windows)
