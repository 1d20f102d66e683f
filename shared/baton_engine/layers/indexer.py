"""Selects the tokens that latent attention goes over (DeepSeek-AI, "DeepSeek-V3.2", 2025)."""

from collections.abc import Callable

import torch
from torch.nn import functional

from baton_engine.context import Context
from baton_engine.latent_spec import IndexedLatentSpec
from baton_engine.source import Source

from .linear import Linear

# Takes hidden states [T, hidden], vectors [T, low_rank] from which queries are computed, and the context. Afterwards
# the layer attends to what it has selected.
Selector = Callable[[torch.Tensor, torch.Tensor, Context], None]
_EPS = 1e-6  # of the norm of index keys, unless a family has another


class Indexer:
    """Scores the tokens in the cache for each new token, as index_scores_reference does. All ranks compute the same.

    source: of the tensors in `indexer`. hidden: elements of a hidden state. low_rank: elements of the vectors from
    which the queries are computed. rotary: as rotary_tables returns them for rope_dim. interleaved: as in
    LatentAttention, for the indexer alone. eps: of the norm of index keys. rotates_end: the elements that are rotated
    end queries and keys in the checkpoint; otherwise they begin them.
    """

    def __init__(
        self,
        source: Source,
        layer: int,
        spec: IndexedLatentSpec,
        *,
        hidden: int,
        low_rank: int,
        rotary: tuple[torch.Tensor, torch.Tensor],
        interleaved: bool,
        eps: float = _EPS,
        rotates_end: bool = False,
    ) -> None:
        heads, dim = spec.index_heads, spec.index_dim
        self._layer, self._heads, self._ops, self._eps = layer, heads, source.ops, eps
        self._rotary, self._interleaved = rotary, interleaved
        norm = source.at("k_norm")
        weight, bias = (norm.take(name, (dim,), dtype=torch.float32) for name in ("weight", "bias"))
        order = by_head = None
        if rotates_end:
            # Scores do not depend on the order of the elements, and the kernel rotates the first ones.
            order = [*range(dim - spec.rope_dim, dim), *range(dim - spec.rope_dim)]
            by_head = [head * dim + element for head in range(heads) for element in order]
            weight, bias = weight[order], bias[order]
        self._queries = Linear(source, ["wq_b"], [heads * dim], low_rank, order=by_head, sensitive=True)
        self._keys = Linear(source, ["wk"], [dim], hidden, order=order, sensitive=True)
        self._norm = weight, bias
        # The products of each head are scaled by dim ** -0.5, and their sum by heads ** -0.5. The weights can contain
        # both factors, because relu commutes with factors above 0.
        factor = (heads * dim) ** -0.5
        self._weights = source.take("weights_proj.weight", (heads, hidden), dtype=torch.float32) * factor

    def __call__(self, x: torch.Tensor, query_inputs: torch.Tensor, ctx: Context) -> None:
        """x: [T, hidden]. query_inputs: [T, low_rank]. Afterwards the index keys of the tokens are in the cache, and
        this layer attends to the selected tokens."""
        ctx.select(self._layer, self.queries(x, query_inputs, ctx), functional.linear(x.float(), self._weights))

    def queries(self, x: torch.Tensor, query_inputs: torch.Tensor, ctx: Context) -> torch.Tensor:
        """Return the indexer's queries [T, heads, dim], and write the index keys to the cache. The arguments are those
        of __call__."""
        slots, _, index_keys = ctx.cache(self._layer)
        return self._ops.index_rope_and_cache(
            self._queries(query_inputs), self._keys(x), *self._norm, self._eps, self._rotary, self._interleaved,
            ctx.positions, slots, index_keys, self._heads,
        )  # fmt: skip
