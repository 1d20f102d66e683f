"""A linear layer: which part of it this rank computes, and how its weight is stored and multiplied."""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch

from baton_engine.config import ConfigError
from baton_engine.inputs import NUMBERS, InputRows, Inputs
from baton_engine.quantization.side_by_side import SideBySide
from baton_engine.shard import REPLICATED, Shard
from baton_engine.source import Outputs, Source


class Linear:
    """y = x Wᵀ + b, where W may be several projections of the checkpoint stacked along their outputs."""

    def __init__(
        self,
        source: Source,
        names: list[str],
        outputs: list[int],
        inputs: int,
        *,
        bias: bool = False,
        order: Sequence[int] | None = None,
        parts: Sequence[int] | None = None,
        transposed: bool = False,
        shard: Shard = REPLICATED,
        sensitive: bool = False,
    ) -> None:
        """Read the projections as Method.load does, by the methods that the source has for their names.

        order: for each output of the whole layer, the output of the checkpoint that it takes; None = the same order.
        parts: the sizes of the parts that the shard divides, if a projection of the checkpoint consists of several
        parts; None = outputs. sensitive: small errors of the weight change which tokens or experts are chosen, so it is
        never quantized on load.
        """
        self._shard = shard
        methods = dict(zip(names, source.methods(names, sensitive), strict=True))
        try:
            wanted, columns = shard.outputs(parts or outputs), shard.inputs(inputs)
        except ConfigError as error:
            raise ConfigError(f"{source.full_name(names[0])}: {error}") from None
        taken, own_order = _taken(names, outputs, wanted, parts or outputs, order)
        added = bias and shard.adds_bias
        runs = [(method, list(run)) for method, run in groupby(taken, key=lambda part: methods[part.name])]
        if len(runs) == 1:
            self._product = runs[0][0].load(source, taken, inputs, columns, added, own_order, transposed)
        else:
            apart = [method.load(source, run, inputs, columns, added, None, transposed) for method, run in runs]
            self._product = SideBySide(apart, source, own_order)
        self.inputs = self._product.inputs

    def __call__(self, x: InputRows, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, inputs]. Returns [T, outputs], in out when given."""
        return self._shard.join(self._product(x, out))

    def gated(self, x: InputRows, activation: str, into: Inputs = NUMBERS) -> InputRows:
        """Return activation(gate) * up, [T, outputs / 2], as Product.gated does.

        Ranks divide the outputs of such a layer, never its inputs, so no results have to be joined.
        """
        return self._product.gated(x, activation, into)


def _taken(
    names: list[str], outputs: list[int], wanted: list[slice], parts: Sequence[int], order: Sequence[int] | None
) -> tuple[list[Outputs], Sequence[int] | None]:
    """Return the outputs of the checkpoint that a rank takes, and the order in which the layer has them.

    wanted: of each of the parts. order: as in Linear.
    """
    whole = all(part == slice(0, size) for part, size in zip(wanted, parts, strict=True))
    if whole or (order is None and list(parts) == outputs):
        rows = wanted if not whole else [slice(0, size) for size in outputs]
        return [Outputs(*each) for each in zip(names, outputs, rows, strict=True)], order
    starts = accumulate(parts, initial=0)
    places = np.concatenate(
        [np.arange(start + part.start, start + part.stop) for start, part in zip(starts, wanted, strict=False)]
    )
    stored = places if order is None else np.asarray(order)[places]
    taken, own_order = np.unique(stored, return_inverse=True)
    # Each run of neighbours in one projection is one range of the checkpoint.
    ends = list(accumulate(outputs, initial=0))
    breaks = (np.diff(taken) > 1) | (np.diff(np.searchsorted(ends, taken, side="right")) > 0)
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(taken)]
    runs = []
    for first, end in pairwise(bounds):
        at = int(np.searchsorted(ends, taken[first], side="right")) - 1
        run = slice(int(taken[first]) - ends[at], int(taken[end - 1]) + 1 - ends[at])
        runs.append(Outputs(names[at], outputs[at], run))
    same = np.array_equal(own_order, np.arange(len(taken)))
    return runs, None if same else own_order.tolist()
