"""One pass of a model over the tokens of a step."""

from collections.abc import Callable

import msgspec
import torch

from .attention.backend import AttentionBackend
from .kv_cache import KvCache


class Tokens(msgspec.Struct):
    """The model's inputs, [T] int64 each, sequences one after another.

    slots: [groups of layers, T], block * block_size + offset, where each token's KV goes; -1 = nowhere.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class Context:
    """What a model's forward pass reads beside its weights, and the one thing that it asks for: attention.

    All else that a model computes depends on the numbers of its inputs alone, so that a CUDA graph can hold it.
    `attend` is where the graphs of a pass are cut: a subclass records them.
    """

    def __init__(
        self,
        tokens: Tokens,
        cache: KvCache,
        backend: AttentionBackend,
        written: Callable[[int], None] | None = None,
    ) -> None:
        """The backend is prepared for these tokens. written: called with the number of each layer when what writes its
        KV has been launched."""
        self.ids, self.positions = tokens.ids, tokens.positions
        self._slots, self._cache = tokens.slots, cache
        self._backend = backend
        self._written = written

    def cache(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return where a layer puts the tokens' KV: their slots, [T] int64, and the layer's planes."""
        return self._slots[self._cache.group_of(layer)], *self._cache.layer(layer)

    def queries(self, tokens: int, heads: int, head_dim: int) -> torch.Tensor | None:
        """Return where a layer must put its queries, [tokens, heads, head_dim]; None = into a new tensor."""
        return None

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the attention of queries [T, heads, head_dim] over the cache, which holds the tokens' KV, as much."""
        if self._written:
            self._written(layer)
        attended = torch.empty_like(q)
        self._backend.attend(layer, q, attended)
        return attended
