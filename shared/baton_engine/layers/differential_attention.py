"""Attention by the difference of two softmaxes (Ye et al., "Differential Transformer", 2025)."""

from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.shard import head_part
from baton_engine.source import Source

from .attention import Attention
from .norm import UnitNorm


class Expanded:
    """A projection to the heads of a DifferentialAttention in which each of them has its own key and value.

    qkv: the projection to the checkpoint's heads of this rank: for each pair of key-value heads, the queries of its
    first and those of its second one, then the keys, then the values. pairs: of this rank. queries: of a key-value
    head. dim: elements of a head.
    """

    def __init__(self, qkv: Any, pairs: int, queries: int, dim: int) -> None:
        self._qkv, self.inputs = qkv, qkv.inputs
        self._shape = pairs, queries, dim

    def __call__(self, x: InputRows) -> torch.Tensor:
        qkv, (pairs, queries, dim) = self._qkv(x), self._shape
        sizes = [2 * pairs * heads * dim for heads in (queries, 1, 1)]
        q, k, v = qkv.split(sizes, dim=1)
        # A pair of heads has two keys and two values. Each of its keys is combined with each of its values, so a pair
        # becomes four heads.
        q = q.unflatten(1, (pairs, 2, 1, -1)).expand(-1, -1, -1, 2, -1)
        k = k.unflatten(1, (pairs, 2, 1, -1)).expand(-1, -1, -1, 2, -1)
        v = v.unflatten(1, (pairs, 1, 2, -1)).expand(-1, -1, 2, -1, -1)
        return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)


class DifferentialAttention(Attention):
    """Attention of pairs of key-value heads. A pair has two keys, and its values are side by side.

    Each query of a pair has two parts, one for each key. Both attend to the values of the pair. The result of the
    second part, times a factor, is subtracted from that of the first, and the difference is normalized.

    The cache has four heads for each pair, so that keys and values have the same dim in all kernels: each key and each
    value is there twice.
    """

    def __init__(self, source: Source, base: float, pairs: int, eps: float, dim: int, *others: Any) -> None:
        """source: of the factor's parameters. base: added to the factor. pairs: of key-value heads, of all ranks. eps:
        of the norm. dim: elements of a head. others: as in Attention."""
        super().__init__(*others)
        vectors = (source.take(f"lambda_{name}", (dim,), dtype=torch.float32) for name in ("q1", "k1", "q2", "k2"))
        first_query, first_key, second_query, second_key = vectors
        self._factor = (first_query * first_key).sum().exp() - (second_query * second_key).sum().exp() + base
        own = head_part(pairs, source.ranks)
        self._pairs, self._rest = own.stop - own.start, 1 - base
        self._norm = UnitNorm(source, 2 * dim, eps)

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        attended = ctx.attend(self._layer, self.queries(x, ctx))
        first, second = attended.view(len(attended), self._pairs, 2, 2, -1, self._head_dim).unbind(2)
        # The values of a query follow each other.
        difference = (first - self._factor * second).to(attended.dtype).transpose(2, 3)
        normed = self._norm(difference.reshape(-1, 2 * self._head_dim)).mul_(self._rest)
        return self._output(normed.view(len(attended), -1))
