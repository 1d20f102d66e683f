"""Attention over the paged KV cache."""

from collections.abc import Callable
from copy import copy
from typing import Any, Self

import torch

from baton_engine.context import Context
from baton_engine.inputs import InputRows, inputs_of
from baton_engine.model_config import ModelConfig
from baton_engine.shard import head_part
from baton_engine.source import Source

from .linear import Linear
from .norm import RmsNorm


class Attention:
    """Grouped-query attention (Ainslie et al., 2023) of one layer.

    Each rank has some of the heads. qkv: returns their queries, then keys, then values,
    [T, (heads + kv_heads) * head_dim + kv_heads * value_dim]. output: adds up what the heads of all ranks contribute.
    rotary: cosines and sines as rotary_tables returns them; None = queries and keys are not rotated. qk_norms: norms of
    each query and key head. sinks: [heads of this rank] float32, as in AttentionSpec.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        source: Source,
        qkv: Callable[[Any], torch.Tensor],
        output: Linear,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
        qk_norms: tuple[RmsNorm, RmsNorm] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        heads = head_part(config.num_heads, source.ranks)
        self._layer, self._heads, self._head_dim = layer, heads.stop - heads.start, config.head_dim
        self._ops, self._qkv, self._output, self._rotary = source.ops, qkv, output, rotary
        self._norms = None if qk_norms is None else (qk_norms[0].weight, qk_norms[1].weight)
        self._eps = 0.0 if qk_norms is None else qk_norms[0].eps
        self._sinks = sinks
        self.inputs = inputs_of(qkv)

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]. Afterwards the keys and values of the tokens are in the cache."""
        return self._output(ctx.attend(self._layer, self.queries(x, ctx), self._sinks).flatten(1))

    def of_layer(self, layer: int) -> Self:
        """Return attention with the same weights that has the keys and values of another layer."""
        again = copy(self)
        again._layer = layer
        return again

    def queries(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """Return the queries [T, heads, head_dim] of x [T, hidden], and write its keys and values to the cache."""
        qkv = self._qkv(x)
        return self._ops.rope_and_cache(
            qkv, self._rotary, ctx.positions, *ctx.cache(self._layer)[:3],
            self._heads, self._norms, self._eps, ctx.queries(len(qkv), self._heads, self._head_dim),
            ctx.inverse_scales(self._layer),
        )  # fmt: skip
