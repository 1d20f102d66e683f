"""Layers of Mamba 1 in place of attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.shard import Columns, Rows, even_part
from baton_engine.source import Source
from baton_kernels.reference.selective_scan import ChannelShape, ScanInputs

from .linear import Linear

Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Mamba1Fields:
    """How a model has Mamba 1.

    rank: elements of the vector from which the rates of all channels are computed. bias, conv_bias: of the first and
    the last projection, and of the convolution.
    """

    rank: int
    bias: bool
    conv_bias: bool


class Mamba1:
    """A layer of Mamba 1 (Gu and Dao, 2023). Ranks divide the channels.

    whole: the channels of all ranks. norms: of the vector of rates, of B and of C.
    """

    def __init__(
        self, source: Source, layer: int, whole: ChannelShape, how: Mamba1Fields, hidden: int, norms: Sequence[Norm]
    ) -> None:
        ranks, inner, state = source.ranks, whole.channels, whole.state
        self._layer, self._ops, self._norms = layer, source.ops, norms
        self._shape = whole.part(ranks.count)
        self._projection = Linear(
            source, ["in_proj"], [2 * inner], hidden, bias=how.bias, parts=[inner, inner],
            shard=Columns(ranks, "channels"),
        )  # fmt: skip
        self.inputs = self._projection.inputs
        own = even_part(inner, ranks, "channels")
        convolution = source.at("conv1d")
        self._filters = convolution.take("weight", (inner, 1, whole.length), (own,)).flatten(1)
        self._conv_bias = convolution.take("bias", (inner,), (own,)) if how.conv_bias else None
        self._sizes = [how.rank, state, state]
        # All ranks need B, C and the vector of rates as a whole, each of which depends on all channels.
        self._vectors = Linear(source, ["x_proj"], [sum(self._sizes)], inner, shard=Rows(ranks))
        # The scan adds the bias of the rates, without rounding the sum.
        self._rates = Linear(source, ["dt_proj"], [inner], how.rank, shard=Columns(ranks, "channels"))
        self._rate_bias = source.take("dt_proj.bias", (inner,), (own,), torch.float32)
        self._log_decay = source.take("A_log", (inner, state), (own,), torch.float32)
        self._skip = source.take("D", (inner,), (own,), torch.float32)
        self._output = Linear(source, ["out_proj"], [hidden], inner, bias=how.bias, shard=Rows(ranks))

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        shape, slots = self._shape, ctx.recent_slots(self._layer)
        keys, values = shape.planes(ctx.cache(self._layer)[1:])
        inputs, gates = self._projection(x).chunk(2, dim=1)
        inputs = self._ops.convolve(inputs, self._filters, self._conv_bias, slots, values, shape)
        vectors = torch.split(self._vectors(inputs), self._sizes, dim=1)
        rates, added, read = (norm(vector) for norm, vector in zip(self._norms, vectors, strict=True))
        given = ScanInputs(
            inputs, self._rates(rates), gates, added, read, self._log_decay, self._rate_bias, self._skip
        )  # fmt: skip
        return self._output(self._ops.selective_scan(given, slots, keys, shape))
