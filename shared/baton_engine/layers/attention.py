"""Attention over the paged KV cache."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.inputs import Rows, inputs_of
from baton_engine.model_config import ModelConfig
from baton_engine.ops import Ops

from .linear import Linear
from .norm import RmsNorm


class Attention:
    """Grouped-query attention (Ainslie et al., 2023) of one layer.

    qkv: returns queries, then keys, then values, [T, (heads + 2 * kv_heads) * head_dim]. rotary: cosines and sines as
    rotary_tables returns them; None = queries and keys are not rotated. qk_norms: norms of each query and key head.
    sinks: [heads] float32, as in AttentionSpec.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        ops: Ops,
        qkv: Callable[[Any], torch.Tensor],
        output: Linear,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        qk_norms: tuple[RmsNorm, RmsNorm] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self._layer, self._heads, self._head_dim = layer, config.num_heads, config.head_dim
        self._ops, self._qkv, self._output, self._rotary = ops, qkv, output, rotary
        self._norms = None if qk_norms is None else (qk_norms[0].weight, qk_norms[1].weight)
        self._eps = 0.0 if qk_norms is None else qk_norms[0].eps
        self._sinks = sinks
        self.inputs = inputs_of(qkv)

    def __call__(self, x: Rows, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]. Afterwards the keys and values of the tokens are in the cache."""
        return self._output(ctx.attend(self._layer, self.queries(x, ctx), self._sinks).flatten(1))

    def queries(self, x: Rows, ctx: Context) -> torch.Tensor:
        """Return the queries [T, heads, head_dim] of x [T, hidden], and write its keys and values to the cache."""
        qkv = self._qkv(x)
        return self._ops.rope_and_cache(
            qkv, self._rotary, ctx.positions, *ctx.cache(self._layer),
            self._heads, self._norms, self._eps, ctx.queries(len(qkv), self._heads, self._head_dim),
            ctx.inverse_scales(self._layer),
        )  # fmt: skip
