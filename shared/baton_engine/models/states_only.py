"""The config of models that have no attention: each layer is a norm and a block with states."""

import math
from typing import Any, Self, TypeVar

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope
from baton_engine.shard import Place, even_part
from baton_kernels.reference.recurrence import StateShape
from baton_kernels.reference.selective_scan import ChannelShape

from .llama import SILU, Defaults, LlamaConfig, read_llama_config
from .recurrent_states import WithStates, state_windows
from .unrotated import NO_ROPE

# There are no key-value heads, but the cache and ranks divide states as if there were, at most so many.
_MOST_GROUPS = 8
# In 16 bits, a group's states take this many rows of a block, and so a block has about as many tokens. With fewer
# tokens there would be more states, with more tokens a known prefix would be found in longer steps.
_ROWS = 256
_MOST_DIM = 256  # of heads, for which attention backends have tiles
# States have no limit of length. This is more than any prompt has.
_MOST_TOKENS = 1 << 20


class StatesOnlyConfig(WithStates, LlamaConfig, frozen=True, kw_only=True):
    """intermediate_size: channels. Around them a layer has the weights that a gated MLP with as many hidden units has.

    trained: tokens of the longest sequences that the model was trained on.
    """

    state_layers: frozenset[int]
    trained: int

    @property
    def default_model_len(self) -> int:
        return min(self.trained, self.max_position_embeddings)

    @property
    def value_dim(self) -> int:
        """As in ModelConfig: what the plane of values has of a group takes as many rows of a block as that of keys."""
        assert self.states is not None
        keys, values = self.states.plane_elements
        return 2 * -(-self.head_dim * values // (2 * keys))

    def rope_of(self, layer: int) -> Rope | None:
        return None

    def part(self, ranks: Place) -> Self:
        even_part(self.num_kv_heads, ranks, "groups of Mamba's states")  # there are no heads to name in an error
        return super().part(ranks)


Kind = TypeVar("Kind", bound=StatesOnlyConfig)


def groups_of(units: int) -> int:
    """Return into how many groups the cache divides heads or channels."""
    return math.gcd(units, _MOST_GROUPS)


def read_states_only(
    kind: type[Kind], file: ConfigFile, shape: StateShape | ChannelShape, channels: int, tied: bool, **facts: Any
) -> Kind:  # fmt: skip
    """Return the config of a config.json. shape: of all layers' states. tied: the default of tie_word_embeddings.
    facts: the other fields of the config."""
    layers, dim = file.count("num_hidden_layers"), shape.plane_elements[0] * 4 // (2 * _ROWS)
    # The sizes that attention would have.
    sizes = {"num_attention_heads": shape.groups, "num_key_value_heads": shape.groups, "intermediate_size": channels}
    sizes["head_dim"] = min(max(dim // 2 * 2, 2), _MOST_DIM)
    return read_llama_config(
        kind,
        ConfigFile({**file.fields, **sizes}),
        Defaults(_MOST_TOKENS, tie_word_embeddings=tied),
        state_windows(frozenset(range(layers)), layers),
        rope=NO_ROPE,
        eps=file.number("layer_norm_epsilon", 1e-5),
        activations=SILU,
        state_layers=frozenset(range(layers)),
        states=shape,
        **facts,
    )
