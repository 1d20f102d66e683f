"""A projection that several layers share, with what each of them adds to it."""

from collections.abc import Sequence

import torch

from baton_engine.inputs import NUMBERS, InputRows, Inputs
from baton_engine.source import Source

from .linear import Linear


class AdaptedProjection:
    """The sum of a projection that layers share and of one layer's adapters of low rank (Hu et al., "LoRA", 2021).

    shared: [T, inputs] to [T, outputs]. down: to the vectors of all adapters side by side, of one size. up: of each
    adapter, from its vector to some of the outputs; together they have all outputs, in their order.
    """

    def __init__(self, source: Source, shared: Linear, down: Linear, up: Sequence[Linear]) -> None:
        self._ops, self._shared, self._down, self._up = source.ops, shared, down, up
        # The projections may be stored in formats that take different forms of the inputs.
        self.inputs: Inputs = NUMBERS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, inputs]. Returns [T, outputs]."""
        vectors = self._down(x).chunk(len(self._up), dim=1)
        added = [up(vector.contiguous()) for up, vector in zip(self._up, vectors, strict=True)]
        return self._shared(x).add_(added[0] if len(added) == 1 else torch.cat(added, dim=1))

    def gated(self, x: torch.Tensor, activation: str, into: Inputs) -> InputRows:
        """Return activation(gate) * up, [T, outputs / 2], as Product.gated does."""
        return into.gate(self._ops, self(x), activation)
