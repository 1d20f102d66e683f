"""Lightning attention (Qin et al., "Lightning Attention-2", 2024): states that decay by a constant factor."""

import torch

from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.shard import Columns, Rows, even_part
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateInputs, StateShape

from .grouped_norm import GroupedNorm
from .linear import Linear

_EPS = 1e-6  # whatever config.json says of other norms


class Lightning:
    """Lightning attention, with a norm across the results of all heads and gates of them. Ranks divide the heads.

    whole: the heads of all ranks, which have states but no convolution. slopes: [heads] float32: a head's state decays
    by exp(-slope) with each token.
    """

    def __init__(self, source: Source, layer: int, whole: StateShape, slopes: torch.Tensor, hidden: int) -> None:
        ranks, heads, values = source.ranks, whole.value_heads, whole.values
        self._layer, self._op, self._shape = layer, source.ops.recurrence, whole.part(ranks.count)
        # The checkpoint has the query, the key and the value of one head after those of another.
        stored = torch.arange(3 * values).view(heads, 3, -1).transpose(0, 1).flatten()
        self._projection = Linear(
            source, ["qkv_proj", "output_gate"], [3 * values, values], hidden,
            order=[*stored.tolist(), *range(3 * values, 4 * values)], parts=[values] * 4,
            shard=Columns(ranks, "channels"),
        )  # fmt: skip
        self.inputs = self._projection.inputs
        # A filter of one token leaves the inputs as they are, before their activation.
        self._filters = torch.ones(self._shape.channels, 1, dtype=source.dtype, device=source.device)
        self._log_decay = slopes[even_part(heads, ranks, "heads")].log().to(source.device)
        self._norm = GroupedNorm(source.at("norm"), values, _EPS, 1, ranks)
        self._output = Linear(source, ["out_proj"], [hidden], values, shard=Rows(ranks))

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        shape = self._shape
        inputs, gates = torch.split(self._projection(x), [shape.channels, shape.values], dim=1)
        given = StateInputs(inputs, self._filters, None, None, None, self._log_decay, None, None)
        planes = shape.planes(ctx.cache(self._layer)[1:])
        results = self._op(given, ctx.recent_slots(self._layer), *planes, shape, ctx.decodes_only)
        return self._output(self._norm(results.flatten(1).float()) * gates.sigmoid())
