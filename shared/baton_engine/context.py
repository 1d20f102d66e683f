"""One pass of a model over the tokens of a step."""

from collections.abc import Callable
from typing import cast

import msgspec
import torch

from .attention.backend import AttentionBackend, SelectingBackend
from .kv_cache import KvCache


class Tokens(msgspec.Struct):
    """The model's inputs, [T] int64 each, sequences one after another.

    slots: [groups of layers * recent tokens, T], block * block_size + offset. The first rows, one for each group, say
    where each token's KV goes; -1 = nowhere. Those after them say where the KV of the token before it is, then of the
    one before that and so on; -1 = there is none (ModelConfig.recent_tokens).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    def split(self, at: int) -> tuple["Tokens", "Tokens"]:
        """Return the tokens before an index, and those from it on."""
        first, second = slice(at), slice(at, None)
        return (
            Tokens(self.ids[first], self.positions[first], self.slots[:, first]),
            Tokens(self.ids[second], self.positions[second], self.slots[:, second]),
        )


class Context:
    """The inputs of a model's forward pass beside its weights, and its access to attention.

    All work but attention has the same shape for every batch of as many tokens, so that a CUDA graph can hold it. The
    graphs of a pass are cut at `attend`, which a subclass records.
    """

    def __init__(
        self,
        tokens: Tokens,
        cache: KvCache,
        backend: AttentionBackend,
        written: Callable[[int], None] | None = None,
        received: torch.Tensor | None = None,
        decodes_only: bool = False,
    ) -> None:
        """The backend must be prepared for these tokens. written: called with the number of each layer once the
        kernels that write its KV have been launched. received: what the previous stage passes on, [T, stream size];
        None = the pass begins with the embedding. decodes_only: no sequence has more than one token."""
        self.ids, self.positions = tokens.ids, tokens.positions
        self._slots, self._cache = tokens.slots, cache
        self._backend = backend
        self._written = written
        self.received, self.decodes_only = received, decodes_only

    def cache(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return where a layer puts the tokens' KV: their slots, [T] int64, and the layer's planes."""
        return self._slots[self._cache.group_of(layer)], *self._cache.layer(layer)

    def recent_slots(self, layer: int) -> torch.Tensor:
        """Return where a layer's KV of each token and of those before it is, [recent tokens, T] int64; -1 = nowhere."""
        return self._slots[self._cache.group_of(layer) :: self._cache.num_groups]

    def inverse_scales(self, layer: int) -> torch.Tensor | None:
        """Return the reciprocals of the scales of a layer's keys, then of its values, [2, kv_heads] float32; None = the
        cache holds numbers."""
        scales = self._cache.scales
        return None if scales is None else scales.inverses(layer)

    def queries(self, tokens: int, heads: int, head_dim: int) -> torch.Tensor | None:
        """Return the tensor for a layer's queries, [tokens, heads, head_dim]; None = the layer allocates one."""
        return None

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Select the tokens to which this layer and those after it attend, until another layer selects.

        queries, weights: as SelectingBackend.select has them. The index keys of the step's tokens are in the cache.
        """
        cast(SelectingBackend, self._backend).select(layer, queries, weights)

    def attend(
        self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None, *, up: torch.Tensor | None = None,
        reads: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return attention, [T, heads, elements of a value], of queries [T, heads, head_dim] over the cache, which has
        the tokens' KV. sinks, up: as AttentionBackend.attend has them. reads: the layer whose KV is read; None = this
        layer."""
        if self._written:
            self._written(layer)
        attended = self._backend.outputs(q)
        self._backend.attend(layer if reads is None else reads, q, attended, sinks, up)
        return attended
