"""A linear layer: which part of it this rank computes, and how its weight is stored and multiplied."""

from collections.abc import Sequence

import torch

from baton_engine.inputs import NUMBERS, Inputs, Rows
from baton_engine.shard import REPLICATED, Shard
from baton_engine.source import Source


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
        transposed: bool = False,
        shard: Shard = REPLICATED,
        sensitive: bool = False,
    ) -> None:
        """Read the projections as Method.load does, by the method that the source has for their names.

        sensitive: small errors of the weight change which tokens or experts are chosen, so that the weight is never
        quantized here, but only where the checkpoint is.
        """
        self._shard = shard
        method = source.method(names, sensitive)
        self._product = method.load(source, names, outputs, inputs, bias, shard, order, transposed)

        self.inputs = self._product.inputs

    def __call__(self, x: Rows, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, inputs]. Returns [T, outputs], in out when given."""
        return self._shard.join(self._product(x, out))

    def gated(self, x: Rows, activation: str, into: Inputs = NUMBERS) -> Rows:
        """Return activation(gate) * up, [T, outputs / 2], as Product.gated does.

        Ranks divide the outputs of such a layer, never its inputs, so that nothing is joined.
        """
        return self._product.gated(x, activation, into)
