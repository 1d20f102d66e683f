"""The config of a model, with the fields that the engine needs for every family."""

from typing import Any, Self

import msgspec

from baton_common.kv_layout import KvLayout, Plane

from .attention_spec import AttentionSpec
from .config import ConfigError
from .shard import Place, head_part


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer. Sizes are in elements. Each family adds the fields that only its layers need."""

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
    num_experts: int = 0  # of a layer that has experts; 0 = no layer has any

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        # Rotations and their kernels work on pairs of dimensions.
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; it must be even")

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The window of each layer, in tokens, the query's own included."""
        return tuple(spec.window for spec in self.attention)

    @property
    def kv_layers(self) -> int:
        """How many layers have keys and values of their own. These are the first ones. Each later layer reads the keys
        and values of one of them."""
        return self.num_layers

    @property
    def recent_tokens(self) -> int:
        """How many of a sequence's last tokens layers read from the cache without attention, the current one
        included."""
        return 1

    @property
    def value_dim(self) -> int:
        """The elements of a head's value, of which its key and its query have head_dim."""
        return self.head_dim

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The dims of keys in all kinds of layers."""
        return (self.head_dim,)

    @property
    def known_tokens(self) -> int:
        """How many token ids the model was made for. Those from vocab_size on stand for images, which are not
        served."""
        return self.vocab_size

    @property
    def query_shapes(self) -> tuple[tuple[int, int], ...]:
        """The number of query heads and their dim in all kinds of layers."""
        return tuple((self.num_heads, dim) for dim in self.head_dims)

    @property
    def default_model_len(self) -> int:
        """The most tokens of a sequence unless --max-model-len names another number."""
        return self.max_position_embeddings

    @property
    def stream_size(self) -> int:
        """The elements that a layer passes on for a token, and that a stage of a pipeline sends."""
        return self.hidden_size

    @property
    def layer_weights(self) -> int:
        """The number of elements in the weight matrices of one layer that a token is multiplied with."""
        return self.attention_weights + 3 * self.hidden_size * self.intermediate_size

    @property
    def mlp_units(self) -> float:
        """The number of hidden units of one layer's MLP that a token uses."""
        return self.intermediate_size

    @property
    def attention_weights(self) -> int:
        """The number of elements in the weight matrices around one layer's attention."""
        return sum(outputs * inputs for outputs, inputs in self.projections)

    @property
    def projections(self) -> list[tuple[int, int]]:
        """Outputs and inputs of each matrix around one layer's attention."""
        keyed = (self.num_heads + self.num_kv_heads) * self.head_dim
        outputs = keyed + self.num_kv_heads * self.value_dim
        return [(outputs, self.hidden_size), (self.hidden_size, self.num_heads * self.value_dim)]

    @property
    def kv_elements(self) -> int:
        """Elements that the cache holds of one token in one layer."""
        return sum(plane.heads * plane.dim for plane in self.kv_layout(self.dtype).planes)

    def attention_lengths(self, longest: int) -> list[int]:
        """Return the tokens of the longest sequence for each way in which attention is computed, in ascending order.

        The last number is `longest`, the most tokens of any sequence.
        """
        return [longest]

    def pair_operations(self, decode: bool) -> int:
        """Return the additions and multiplications in one layer's attention for each pair of a query and a key.

        decode: with one new token for each sequence.
        """
        return 2 * self.num_heads * (self.head_dim + self.value_dim)

    def layer_weights_read(self, tokens: float) -> float:
        """Return how many elements of one layer's weight matrices a step of so many tokens reads."""
        return self.layer_weights

    def limited(self, max_positions: int) -> Self:
        """Return the config for an engine whose sequences have at most max_positions tokens."""
        return self

    def part(self, ranks: Place) -> Self:
        """Return the config of what one rank has: its heads. Raises ConfigError if the heads cannot be divided."""
        if ranks.count == 1:
            return self
        heads = head_part(self.num_heads, ranks, "attention heads")
        kv_heads = head_part(self.num_kv_heads, ranks, "key-value heads")
        if self.num_heads < ranks.count:
            raise ConfigError(f"--tensor-parallel {ranks.count} is more than the {self.num_heads} attention heads")
        return msgspec.structs.replace(
            self,
            num_heads=heads.stop - heads.start,
            num_kv_heads=kv_heads.stop - kv_heads.start,
            attention=tuple(spec.part(heads) for spec in self.attention),
        )

    def fingerprint_facts(self) -> dict[str, Any]:
        """Return the facts that two engines must share for one to decode on the other's KV."""
        # The fields are listed by name, so that a field added in a later version does not change the fingerprint:
        # engines of both versions can still exchange KV.
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
        """Return the layout of the model's KV in a cache of this dtype."""
        dims = {"key": self.head_dim, "value": self.value_dim}
        planes = tuple(Plane(name, self.num_kv_heads, dim, dtype) for name, dim in dims.items())
        windows = self.sliding_windows[: self.kv_layers]
        return KvLayout(self.kv_layers, planes, windows if any(windows) else ())
