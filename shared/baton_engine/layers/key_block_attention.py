"""Grouped-query attention over the blocks of keys that an indexer selects."""

from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.inputs import NUMBERS
from baton_engine.model_config import ModelConfig
from baton_engine.shard import Heads, head_part
from baton_engine.source import Source

from .attention import Attention
from .linear import Linear
from .norm import RmsNorm


class KeyBlockIndexer:
    """Makes an index query of each token for each key-value head of this rank, and its index key, which all heads share
    (MiniMax, MiniMax M3, 2026).

    names: of the projections to index queries and to the index key. norms: of an index query and of the index key. Both
    have head_dim elements, and are rotated as queries and keys of attention are. rotary: as in Attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        source: Source,
        names: tuple[str, str],
        order: list[int] | None,
        norms: tuple[RmsNorm, RmsNorm],
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """order: of the outputs of both projections, as in Linear."""
        heads, dim = head_part(config.num_kv_heads, source.ranks), config.head_dim
        self._layer, self._heads, self._dim = layer, heads.stop - heads.start, dim
        self._ops, self._rotary = source.ops, rotary
        shard = Heads(source.ranks, dim, divided=1)
        sizes = [config.num_kv_heads * dim, dim]
        self._projection = Linear(
            source, [*names], sizes, config.hidden_size, order=order, shard=shard, sensitive=True
        )  # fmt: skip
        self._norms, self._eps = (norms[0].weight, norms[1].weight), norms[0].eps

    def __call__(self, x: torch.Tensor, ctx: Context) -> None:
        """x: [T, hidden]. Afterwards the index keys of the tokens are in the cache, and each key-value head of this
        layer attends to the blocks that it has selected."""
        both = self._projection(x)
        slots, _, _, index_keys = ctx.cache(self._layer)
        if self._heads > 1:
            both = torch.cat([both, *[both[:, -self._dim :]] * (self._heads - 1)], dim=1)
        queries = self._ops.rope_and_cache(
            both, self._rotary, ctx.positions, slots, index_keys, index_keys[..., :0], self._heads, self._norms,
            self._eps,
        )  # fmt: skip
        ctx.select(self._layer, queries)


class KeyBlockAttention(Attention):
    """Attention to the keys that an indexer of the same layer selects."""

    def __init__(self, *parts: Any, indexer: KeyBlockIndexer) -> None:
        """parts: the arguments of Attention."""
        super().__init__(*parts)
        self._indexer = indexer
        # The projections of both may be stored in formats that take different forms of the inputs.
        self.inputs = NUMBERS

    def __call__(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:  # type: ignore[override]
        self._indexer(x, ctx)
        return super().__call__(x, ctx)
