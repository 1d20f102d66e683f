"""A short convolution over a sequence's tokens in place of attention."""

import torch

from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.shard import Columns, Rows, even_part
from baton_engine.source import Source

from .linear import Linear


class ShortConv:
    """Gated convolution of each channel over the last tokens (LFM2). Ranks divide the channels.

    channels: of all ranks. length: elements of a filter, which are tokens.
    """

    def __init__(self, source: Source, layer: int, channels: int, length: int, bias: bool) -> None:
        columns, rows = Columns(source.ranks, "channels"), Rows(source.ranks)
        parts = [channels] * 3
        self._layer, self._op = layer, source.ops.short_conv
        self._projection = Linear(
            source, ["in_proj"], [3 * channels], channels, bias=bias, parts=parts, shard=columns
        )  # fmt: skip
        own = even_part(channels, source.ranks, "channels")
        filters = source.at("conv").take("weight", (channels, 1, length), (own, slice(0, 1), slice(0, length)))
        self._weight = filters.flatten(1)
        self._bias = source.at("conv").take("bias", (channels,), (own,)) if bias else None
        self._output = Linear(source, ["out_proj"], [channels], channels, bias=bias, shard=rows)
        self.inputs = self._projection.inputs

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        _, keys, values = ctx.cache(self._layer)
        slots = ctx.recent_slots(self._layer)
        return self._output(self._op(self._projection(x), self._weight, self._bias, slots, keys, values))
