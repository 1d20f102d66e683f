"""A projection to queries, keys and values whose keys have a bias of all their scores."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from baton_engine.inputs import NUMBERS
from baton_engine.shard import head_part
from baton_engine.source import Source

from .linear import Linear
from .norm import RmsNorm

# Keys have as many elements more. Kernels take heads of a multiple of 8 elements.
_MORE = 8


class KeyBiases:
    """Adds a bias to the scores of each key, which its values decide (Shi et al., "Trainable Dynamic Mask Sparse
    Attention", 2025): exp(A * softplus(dt_proj(values))), where the values are those of all heads.

    As an element of the key, divided by the scale of scores, it meets an element of each query that is 1. The elements
    are before the middle of a head, where Rope.order expects those that a partial rotation leaves as they are. The rest
    of what is added to each half is 0.
    """

    def __init__(
        self,
        source: Source,
        qkv: Callable[[Any], torch.Tensor],
        norms: tuple[RmsNorm, RmsNorm],
        heads: int,
        kv_heads: int,
        hidden: int,
        dim: int,
        *,
        bias: bool,
    ) -> None:
        """heads, kv_heads: of all ranks. norms: of each query and of each key head. dim: of heads, without the elements
        that are added. bias: whether the projections have biases."""
        own, self._own = head_part(heads, source.ranks), head_part(kv_heads, source.ranks)
        self._heads, self._kv_heads, self._dim = own.stop - own.start, self._own.stop - self._own.start, dim
        self._qkv, self._norms = qkv, norms
        # Each rank computes the values of all heads, as the bias of a key depends on all of them.
        self._values = Linear(source, ["v_proj"], [kv_heads * dim], hidden, bias=bias)
        self._steps = Linear(source, ["dt_proj"], [kv_heads], kv_heads * dim, bias=bias)
        self._exponents = source.take("A", (kv_heads,), dtype=torch.float32)
        self.inputs = NUMBERS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, (heads + kv_heads) * (dim + 8) + kv_heads * dim]."""
        qkv = self._qkv(x)
        count, half, keyed = len(qkv), self._dim // 2, self._heads + self._kv_heads
        heads = qkv.view(count, -1, self._dim)
        steps = self._exponents * functional.softplus(self._steps(self._values(x)).float())
        wide = qkv.new_zeros(count, keyed, 2, half + _MORE // 2)
        for part, norm in zip((slice(self._heads), slice(self._heads, keyed)), self._norms, strict=True):
            normed = norm(heads[:, part].reshape(-1, self._dim))
            wide[:, part, :, :half] = normed.view(count, -1, 2, half)
        wide[:, : self._heads, 0, half] = 1.0
        wide[:, self._heads :, 0, half] = (steps.exp() * self._dim**0.5)[:, self._own]
        return torch.cat([wide.flatten(1), heads[:, keyed:].flatten(1)], dim=1)


def widened(dim: int) -> int:
    """Return the elements of queries and keys, of which dim are those of the checkpoint."""
    return dim + _MORE
