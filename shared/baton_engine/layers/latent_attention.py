"""Multi-head latent attention over the paged cache, which holds one latent vector of each token."""

import torch

from baton_engine.context import Context
from baton_engine.inputs import NUMBERS, InputRows
from baton_engine.latent_spec import LatentSpec
from baton_engine.shard import REPLICATED, Heads, Rows, head_part
from baton_engine.source import Source

from .indexer import Selector
from .linear import Linear
from .norm import RmsNorm

# The configs of most of these models do not set this epsilon, unlike that of the other norms.
EPS = 1e-6


class Queries:
    """Computes the queries of a rank's heads, and the latents before their norm, [T, rank + rope_dim], on all ranks.

    One product computes the first step of both.

    low_rank: elements of a compressed vector from which the queries are computed; None = they are computed from the
    hidden state. plain: the norm of that vector is a plain tensor, because other products take it, too. bias: the first
    step has biases, except for queries that are computed from the hidden state. eps: of the norm.
    """

    def __init__(
        self, source: Source, spec: LatentSpec, hidden: int, heads: int, low_rank: int | None, plain: bool, bias: bool,
        eps: float = EPS,
    ) -> None:  # fmt: skip
        queries = heads * spec.query_dim
        first = "q_proj" if low_rank is None else "q_a_proj"
        by_heads = Heads(source.ranks, spec.query_dim, divided=1)
        shard = by_heads if low_rank is None else REPLICATED
        sizes = [low_rank or queries, spec.latent_dim]
        self._size = shard.outputs(sizes)[0].stop - shard.outputs(sizes)[0].start
        names, joint = [first, "kv_a_proj_with_mqa"], bias and low_rank is not None
        self._down = Linear(source, names, sizes, hidden, bias=joint, shard=shard)
        self._bias = source.take(f"{names[1]}.bias", (spec.latent_dim,)) if bias and not joint else None
        self._up: Linear | None = None
        self.inputs = self._down.inputs
        if low_rank is not None:
            up = self._up = Linear(source, ["q_b_proj"], [queries], low_rank, shard=by_heads)
            self._norm = RmsNorm(source.at("q_a_layernorm"), low_rank, eps).before(None if plain else up)

    def __call__(self, x: InputRows) -> tuple[torch.Tensor, torch.Tensor, InputRows]:
        """x: [T, hidden]. Returns queries [T, heads * query_dim] and latents [T, latent_dim], with contiguous rows, and
        the vectors from which the queries are computed."""
        both = self._down(x)
        q, kv = both[:, : self._size], both[:, self._size :]
        if self._bias is not None:
            kv += self._bias
        if self._up is None:
            return q, kv, x
        compressed = self._norm(q)
        return self._up(compressed), kv, compressed


class LatentAttention:
    """Latent attention of one layer (DeepSeek-AI, "DeepSeek-V2", 2024).

    low_rank: as in Queries. bias: as in Queries, and the output has one, too. rotary: cosines and sines as
    rotary_tables returns them for rope_dim. interleaved: the projections return the two elements of each rotated pair
    side by side. scales: the factor of the queries at each position, [positions]; None = 1 everywhere. latent_scale:
    the factor of the latents after their norm. Both ways of latent attention share one copy of the weights that turn
    latents into keys and values. indexer: selects the tokens that this layer and later ones attend to; None = the layer
    attends to all tokens, or to those that an earlier layer has selected. output: the name of the last projection. eps:
    of all norms. sinks: the name of the sinks, if the spec has them. rope_norm: the name of the norm of the keys'
    rotated elements before their rotation; None = there is none.
    """

    sinks = "learnable_sink_param"
    rope_norm: str | None = None

    def __init__(
        self,
        source: Source,
        layer: int,
        spec: LatentSpec,
        *,
        hidden: int,
        heads: int,
        low_rank: int | None,
        bias: bool,
        rotary: tuple[torch.Tensor, torch.Tensor],
        interleaved: bool,
        scales: torch.Tensor | None = None,
        latent_scale: float = 1.0,
        indexer: Selector | None = None,
        output: str = "o_proj",
        eps: float = EPS,
    ) -> None:
        own = head_part(heads, source.ranks)
        self._layer, self._heads, self._spec, self._ops = layer, own.stop - own.start, spec, source.ops
        self._sinks = source.take(self.sinks, (heads,), (own,), torch.float32) if spec.sinks else None
        self._rotary, self._interleaved, self._scales = rotary, interleaved, scales
        self._indexer = indexer
        self._eps = eps
        self._queries = self.make_queries(source, spec, hidden, heads, low_rank, indexer is not None, bias)
        self.inputs = self._queries.inputs if indexer is None else NUMBERS
        self._norm = RmsNorm(source.at("kv_a_layernorm"), spec.rank, eps)
        self._rope_norm: torch.Tensor | None = None
        if self.rope_norm is not None:
            self._rope_norm = RmsNorm(source.at(self.rope_norm), spec.rope_dim, eps).weight
        if latent_scale != 1.0:
            self._norm.weight = self._norm.weight * latent_scale
        outputs = spec.key_dim + spec.value_dim
        rows = slice(own.start * outputs, own.stop * outputs)
        up = source.weight("kv_b_proj", heads * outputs, spec.rank, rows=rows)
        self._up = up.view(self._heads, outputs, spec.rank)
        inputs, rows_of_rank = heads * spec.value_dim, Rows(source.ranks)
        self._output = Linear(source, [output], [hidden], inputs, bias=bias, shard=rows_of_rank)

    def make_queries(
        self, source: Source, spec: LatentSpec, hidden: int, heads: int, low_rank: int | None, plain: bool, bias: bool
    ) -> Queries:
        """Return what computes the queries and latents. The arguments are those of Queries."""
        return Queries(source, spec, hidden, heads, low_rank, plain, bias, self._eps)

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]. Afterwards the latents of the tokens are in the cache."""
        return self._output(self.attend(x, *self._queries(x), ctx).flatten(1))

    def attend(
        self, x: InputRows, q: torch.Tensor, kv: torch.Tensor, query_inputs: InputRows, ctx: Context
    ) -> torch.Tensor:
        """Return the results of this rank's heads, [T, heads, value_dim]. x: as in __call__. q, kv, query_inputs: as
        Queries returns them."""
        if self._indexer is not None:
            assert isinstance(x, torch.Tensor)
            assert isinstance(query_inputs, torch.Tensor)
            self._indexer(x, query_inputs, ctx)
        slots, latents = ctx.cache(self._layer)[:2]
        q = self._ops.latent_rope_and_cache(
            q, kv, self._norm.weight, self._norm.eps, self._rotary, self._interleaved, ctx.positions,
            slots, latents, self._heads, ctx.queries(len(kv), self._heads, self._spec.query_dim), self._rope_norm,
        )  # fmt: skip
        if self._scales is not None:
            q.mul_(self._scales[ctx.positions].view(-1, 1, 1))
        return ctx.attend(self._layer, q, self._sinks, up=self._up)
