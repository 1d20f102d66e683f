"""Attention over the last tokens and over entries that sum up windows of tokens."""

from typing import NamedTuple

import torch

from baton_engine.config import ConfigError
from baton_engine.context import Context
from baton_engine.inputs import NUMBERS
from baton_engine.shard import Heads, Rows, even_part, head_part
from baton_engine.source import Source

from .compressor import Compressor, EntryIndexer, Rotary
from .linear import Linear
from .norm import WideRmsNorm


class AttentionSizes(NamedTuple):
    """hidden: elements of a hidden state. heads, dim: of all ranks' queries. low_rank: elements of the vectors from
    which these are computed. groups: consecutive heads form so many groups, whose results are turned into group_rank
    elements each. eps: of all norms."""

    hidden: int
    heads: int
    dim: int
    low_rank: int
    groups: int
    group_rank: int
    eps: float


class CompressedAttention:
    """Compressed attention of one layer (DeepSeek-AI, "DeepSeek-V4", 2026). Ranks divide the heads and their groups.

    A token's vector is its key and its value, for all heads. Its end is rotated by its position, so that the end of a
    result is rotated back by the position of the query. layer: of the cache, with these vectors. compressor, indexer:
    None = the layer attends to the last tokens alone, or to all entries.
    """

    def __init__(
        self, source: Source, layer: int, sizes: AttentionSizes, rotary: Rotary, compressor: Compressor | None,
        indexer: EntryIndexer | None,
    ) -> None:  # fmt: skip
        ranks, (hidden, heads, dim, low_rank, groups, group_rank, eps) = source.ranks, sizes
        own = head_part(heads, ranks)
        if groups % ranks.count:
            raise ConfigError(
                f"--tensor-parallel {ranks.count} does not divide the {groups} groups of heads (o_groups in "
                "config.json)"
            )
        own_groups = even_part(groups, ranks, "groups of heads")
        self.inputs = NUMBERS
        self._layer, self._heads, self._dim, self._low_rank, self._eps = layer, own.stop - own.start, dim, low_rank, eps
        self._ops, self._rotary, self._compressor, self._indexer = source.ops, rotary, compressor, indexer
        self._down = Linear(source, ["q_a_proj", "kv_proj"], [low_rank, dim], hidden)
        self._query_norm = WideRmsNorm(source.at("q_a_norm"), low_rank, eps)
        self._up = Linear(source, ["q_b_proj"], [heads * dim], low_rank, shard=Heads(ranks, dim))
        self._key_norm = source.take("kv_norm.weight", (dim,), dtype=torch.float32)
        self._sinks = source.take("sinks", (heads,), (own,), torch.float32)
        inputs, rows = heads * dim // groups, slice(own_groups.start * group_rank, own_groups.stop * group_rank)
        weight = source.weight("o_a_proj", groups * group_rank, inputs, rows=rows)
        self._of_groups = weight.view(-1, group_rank, inputs).transpose(1, 2).contiguous()
        self._output = Linear(source, ["o_b_proj"], [hidden], groups * group_rank, shard=Rows(ranks))

    def __call__(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]. Afterwards the tokens' keys and new entries are in the cache."""
        turn, positions, tokens = self._ops.turn_ends, ctx.positions, len(x)
        both = self._down(x)
        compressed = self._query_norm(both[:, : self._low_rank])
        q = self._up(compressed).view(tokens, self._heads, self._dim)
        q = turn(q, self._rotary, positions, eps=self._eps, out=ctx.queries(*q.shape))
        slots, keys = ctx.cache(self._layer)
        self._ops.keep_key(both[:, self._low_rank :], self._key_norm, self._eps, self._rotary, positions, slots, keys)
        if self._compressor is not None:
            self._compressor(x, ctx)
        if self._indexer is not None:
            self._indexer(x, compressed, ctx)
        attended = turn(ctx.attend(self._layer, q, self._sinks), self._rotary, positions, back=True)
        grouped = self._ops.head_product(attended.view(tokens, len(self._of_groups), -1), self._of_groups)
        return self._output(grouped.flatten(1))
