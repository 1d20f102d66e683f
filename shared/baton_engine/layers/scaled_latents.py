"""Latent attention whose queries are multiplied by factors that each head has learned for each position."""

from typing import Any

import torch
from torch.nn import functional

from baton_engine.context import Context
from baton_engine.inputs import NUMBERS, InputRows
from baton_engine.latent_spec import LatentSpec
from baton_engine.shard import Heads, Rows, head_part
from baton_engine.source import Source

from .indexer import Indexer
from .linear import Linear
from .norm import LayerNorm, RmsNorm, UnitNorm

_EPS = 1e-6  # of the norm of the indexer's inputs; configs do not set it


class LearnedFactors:
    """Multiplies the queries of each head by scale * log(position + 1) + offset (Nakanishi, "Scalable-Softmax", 2025).

    heads: of the whole layer. own: those of this rank.
    """

    def __init__(self, source: Source, heads: int, own: slice) -> None:
        self._scale, self._offset = (source.take(name, (heads,), (own,), torch.float32) for name in ("s", "b"))

    def __call__(self, q: torch.Tensor, ctx: Context) -> torch.Tensor:
        """q: [T, heads, dim], overwritten by the result."""
        logarithms = (ctx.positions + 1).float().log_().unsqueeze(1)
        return q.mul_((logarithms * self._scale + self._offset).unsqueeze(2))


class ScaledIndexer(Indexer):
    """An indexer whose queries are computed from the normed hidden state and have LearnedFactors."""

    def __init__(self, source: Source, layer: int, *parts: Any, hidden: int, **names: Any) -> None:
        super().__init__(source, layer, *parts, hidden=hidden, low_rank=hidden, **names)
        self._input_norm = LayerNorm(source.at("q_input_norm"), hidden, _EPS)
        self._factors = LearnedFactors(source.at("ssmax_scaling"), self._heads, slice(0, self._heads))

    def queries(self, x: torch.Tensor, query_inputs: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self._factors(super().queries(x, self._input_norm(query_inputs), ctx), ctx)


class ScaledLatentAttention:
    """Latent attention of one layer with LearnedFactors (Mistral AI, Mistral Large 4, 2026).

    eps: of the norm of latents. bias: latents and the output have one. rotary: as LatentAttention has it, with the
    elements of each rotated pair side by side. rotates: otherwise the latents alone make all elements of a key, and the
    rotated ones are 0 in the cache and in queries. reads: the layer whose latents are read; an earlier one than `layer`
    means that this layer computes none. indexer: as in LatentAttention.
    """

    def __init__(
        self,
        source: Source,
        layer: int,
        spec: LatentSpec,
        *,
        hidden: int,
        heads: int,
        eps: float,
        bias: bool,
        rotary: tuple[torch.Tensor, torch.Tensor],
        rotates: bool,
        reads: int,
        indexer: ScaledIndexer | None,
    ) -> None:
        own = head_part(heads, source.ranks)
        self._layer, self._reads, self._heads, self._ops = layer, reads, own.stop - own.start, source.ops
        self._spec, self._rotary, self._indexer = spec, rotary, indexer
        latents = spec.rank + (spec.rope_dim if rotates else 0)
        names, sizes = ["wq", "wkv_a_with_mqa"], [heads * spec.query_dim, latents]
        computed = len(names) if reads == layer else 1
        shard = Heads(source.ranks, spec.query_dim, divided=1)
        self._down = Linear(source, names[:computed], sizes[:computed], hidden, shard=shard)
        self._bias: torch.Tensor | None = None
        self._norm: RmsNorm = UnitNorm(source, spec.rank, eps)
        if reads == layer:
            self._bias = source.take(f"{names[1]}.bias", (latents,)) if bias else None
            self._norm = RmsNorm(source.at("kv_a_norm"), spec.rank, eps)
        self._unrotated = 0 if rotates else spec.rope_dim
        outputs = spec.key_dim + self._unrotated + spec.value_dim
        rows = slice(own.start * outputs, own.stop * outputs)
        up = source.weight("wkv_b", heads * outputs, spec.rank, rows=rows)
        self._up = up.view(self._heads, outputs, spec.rank)
        self._factors = LearnedFactors(source.at("ssmax_scaling"), heads, own)
        inputs, rows_of_rank = heads * spec.value_dim, Rows(source.ranks)
        self._output = Linear(source, ["wo"], [hidden], inputs, bias=bias, shard=rows_of_rank)
        self.inputs = self._down.inputs if indexer is None else NUMBERS

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]. Afterwards the latents of the tokens are in the cache."""
        if self._indexer is not None:
            assert isinstance(x, torch.Tensor)
            self._indexer(x, x, ctx)
        q, kv = self._projected(self._down(x))
        slots, latents = ctx.cache(self._layer)[:2]
        if self._reads != self._layer:
            slots = torch.full_like(slots, -1)
        q = self._ops.latent_rope_and_cache(
            q, kv, self._norm.weight, self._norm.eps, self._rotary, True, ctx.positions, slots, latents, self._heads,
            ctx.queries(len(q), self._heads, q.shape[1] // self._heads),
        )  # fmt: skip
        attended = ctx.attend(self._layer, self._factors(q, ctx), up=self._up, reads=self._reads)
        return self._output(attended.flatten(1))

    def _projected(self, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and latents before the latents' norm and the rotation. Elements that a layer does not have
        are 0."""
        size = self._heads * self._spec.query_dim
        q, kv = down[:, :size], down[:, size:]
        if self._bias is not None:
            kv = kv + self._bias
        if self._unrotated:
            q = functional.pad(torch.unflatten(q, 1, (self._heads, -1)), (0, self._unrotated)).flatten(1)
        return q, functional.pad(kv, (0, self._spec.latent_dim - kv.shape[1]))
