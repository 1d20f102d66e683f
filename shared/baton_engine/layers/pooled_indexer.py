"""Selects groups of tokens that latent attention goes over (GLM Team, GLM-5.3-Flash, 2026)."""

import torch
from torch.nn import functional

from baton_engine.context import Context
from baton_engine.latent_spec import IndexedLatentSpec
from baton_engine.source import Source

from .linear import Linear

_EPS = 1e-6  # of the norm of index keys


class PooledIndexer:
    """Scores groups of tokens for each new token by one key of each group, as index_scores_reference does for tokens.
    Neither queries nor keys are rotated. All ranks compute the same.

    source: of the tensors in `indexer`. hidden: elements of a hidden state. low_rank: elements of the vectors from
    which the queries are computed.
    """

    def __init__(self, source: Source, layer: int, spec: IndexedLatentSpec, hidden: int, low_rank: int) -> None:
        heads, dim = spec.index_heads, spec.index_dim
        self._layer, self._heads, self._pool, wide = layer, heads, source.ops.pool_index_keys, torch.float32
        self._queries = Linear(source, ["wq_b"], [heads * dim], low_rank, sensitive=True)
        self._keys = Linear(source, ["wk"], [dim], hidden, sensitive=True)
        # No format of quantized weights knows this weight, whose name lacks the usual ending.
        self._gates, self._linear = source.take("index_kpool_compress_gate", (dim, hidden)), source.ops.linear
        norm = source.at("k_norm")
        self._norm = norm.take("weight", (dim,), dtype=wide), norm.take("bias", (dim,), dtype=wide)
        self._offsets = source.take("index_kpool_compress_ape", (spec.group, dim), dtype=wide)
        # As in Indexer, the weights contain the factors of the products and of their sum.
        self._weights = source.take("weights_proj.weight", (heads, hidden), dtype=wide) * (heads * dim) ** -0.5

    def __call__(self, x: torch.Tensor, query_inputs: torch.Tensor, ctx: Context) -> None:
        """x: [T, hidden]. query_inputs: [T, low_rank]. Afterwards the index keys of the tokens are in the cache, and
        this layer attends to the tokens of the selected groups."""
        slots, _, index_rows = ctx.cache(self._layer)
        projected = torch.cat([self._keys(x), self._linear(x, self._gates)], dim=1)
        self._pool(projected, *self._norm, _EPS, self._offsets, ctx.positions, slots, index_rows)
        queries = self._queries(query_inputs).view(len(x), self._heads, -1)
        ctx.select(self._layer, queries, functional.linear(x.float(), self._weights))
