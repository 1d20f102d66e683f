"""Attention of a layer that has no keys and values of its own."""

from typing import Any

import torch

from baton_engine.context import Context

from .attention import Attention


class SharedKvAttention(Attention):
    """Attention over the keys and values of an earlier layer, which is the `layer` that Attention takes (Brandon et
    al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention", 2024).

    qkv: returns queries alone. The norm of keys is not used.
    """

    def queries(self, x: Any, ctx: Context) -> torch.Tensor:
        """Return the queries [T, heads, head_dim] of x [T, hidden]."""
        queries = self._qkv(x)
        slots, *planes = ctx.cache(self._layer)
        return self._ops.rope_and_cache(
            queries, self._rotary, ctx.positions, slots, *(plane[:, :, :0] for plane in planes), self._heads,
            self._norms, self._eps, ctx.queries(len(queries), self._heads, self._head_dim),
            ctx.inverse_scales(self._layer),
        )  # fmt: skip
