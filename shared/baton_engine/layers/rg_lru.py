"""Layers with a real-gated linear recurrent unit in place of attention."""

import torch
from torch.nn import functional

from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.shard import Columns, Rows, even_part
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS
from baton_kernels.reference.rg_lru import UnitInputs
from baton_kernels.reference.selective_scan import ChannelShape

from .linear import Linear

# The paper's constant c: a state decays by exp(-c * softplus(parameter) * gate).
_FASTEST = 8.0


class RgLru:
    """The recurrent block of Griffin (De et al., 2024): a short convolution and an RG-LRU, whose result a gated branch
    multiplies. Ranks divide the heads.

    whole: the channels of all ranks. heads: equal parts of the channels. A channel's gates depend on all channels of
    its head. activation: of the other branch, a key of ACTIVATIONS.
    """

    def __init__(
        self, source: Source, layer: int, whole: ChannelShape, heads: int, hidden: int, activation: str
    ) -> None:
        ranks, width = source.ranks, whole.channels
        self._layer, self._ops, self._activation = layer, source.ops, ACTIVATIONS[activation]
        self._shape = whole.part(ranks.count)
        own_heads, own = even_part(heads, ranks, "heads of the RG-LRU"), even_part(width, ranks, "channels")
        self._projection = Linear(
            source, ["linear_y", "linear_x"], [width, width], hidden, bias=True, shard=Columns(ranks, "channels")
        )  # fmt: skip
        self.inputs = self._projection.inputs
        convolution, unit, each = source.at("conv_1d"), source.at("rg_lru"), width // heads
        self._filters = convolution.take("weight", (width, 1, whole.length), (own,)).flatten(1)
        self._conv_bias = convolution.take("bias", (width,), (own,))
        gates = ("input_gate", "recurrent_gate")
        self._gates = [unit.take(f"{gate}_weight", (heads, each, each), (own_heads,)) for gate in gates]
        # The unit adds the biases, without rounding the sums.
        biases = [unit.take(f"{gate}_bias", (heads, each), (own_heads,), torch.float32) for gate in gates]
        speed = _FASTEST * functional.softplus(unit.take("recurrent_param", (width,), (own,), torch.float32))
        self._input_bias, self._decay_bias, self._speed = *(bias.flatten() for bias in biases), speed
        self._output = Linear(source, ["linear_out"], [hidden], width, bias=True, shard=Rows(ranks))

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        shape, slots = self._shape, ctx.recent_slots(self._layer)
        keys, values = shape.planes(ctx.cache(self._layer)[1:])
        factors, inputs = self._projection(x).chunk(2, dim=1)
        inputs = self._ops.convolve(inputs, self._filters, self._conv_bias, slots, values, shape, silu=False)
        of_heads = inputs.view(len(inputs), len(self._gates[0]), -1)
        input_gates, decay_gates = (self._ops.head_product(of_heads, weight).flatten(1) for weight in self._gates)
        given = UnitInputs(inputs, input_gates, decay_gates, self._input_bias, self._decay_bias, self._speed)
        results = self._ops.rg_lru(given, slots, keys, shape)
        return self._output(results.mul_(self._activation(factors)))
