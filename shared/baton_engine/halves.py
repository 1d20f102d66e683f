"""Large steps of several ranks in two halves: while the ranks add up what they have for one, they compute the other."""

from collections.abc import Callable
from functools import partial

import torch

from .attention.backend import AttentionBackend, AttentionBatch
from .context import Context, Tokens
from .kv_cache import KvCache
from .models.model import Model
from .shard import Ranks

# Products of so many tokens take longer than reading their weights, which both halves do. The first half has a multiple
# of _TILE tokens.
_LEAST_TOKENS, _TILE = 2048, 128


class Halves:
    """The model of a rank, with an attention backend for each half."""

    def __init__(
        self, model: Model, cache: KvCache, backends: tuple[AttentionBackend, AttentionBackend], ranks: Ranks
    ) -> None:
        self._model, self._cache, self._backends, self._ranks = model, cache, backends, ranks

    def fit(self, tokens: Tokens) -> bool:
        """Whether a step has enough tokens."""
        return len(tokens.positions) >= _LEAST_TOKENS

    def forward(
        self,
        tokens: Tokens,
        batch: AttentionBatch,
        written: Callable[[int], None] | None,
        received: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the hidden states of a step. batch: of its tokens. written, received: as Context has them.

        The second half attends to the keys of the first, whose layers are always ahead.
        """
        at = len(tokens.positions) // (2 * _TILE) * _TILE
        for backend, half in zip(self._backends, batch.split(at), strict=True):
            backend.prepare(half)
        first, second = tokens.split(at)
        before, after = (None, None) if received is None else (received[:at], received[at:])
        contexts = (
            Context(first, self._cache, self._backends[0], received=before),
            Context(second, self._cache, self._backends[1], written, after),
        )
        return torch.cat(self._ranks.in_turn([partial(self._model, context) for context in contexts]))
