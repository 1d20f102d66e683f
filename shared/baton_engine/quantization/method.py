"""The interface of all kinds of weights, however they are stored."""

from collections.abc import Sequence
from typing import Protocol, Self

import torch

from baton_engine.shard import Shard
from baton_engine.source import Source


class Method(Protocol):
    """A product with a weight: how that is stored in the checkpoint, held in memory and multiplied."""

    @classmethod
    def load(
        cls,
        source: Source,
        names: list[str],
        outputs: list[int],
        inputs: int,
        bias: bool,
        shard: Shard,
        order: Sequence[int] | None,
        transposed: bool,
    ) -> Self:
        """Read the projections called `names`, each [its outputs, inputs], and stack them along their outputs.

        order: for each output, the output of the checkpoint that it takes; None = the same order. transposed: the
        checkpoint stores weights as [inputs, outputs]. Raises ConfigError for a tensor that is missing or has another
        shape.
        """

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, inputs]. Returns [T, outputs], in out when given."""

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Multiply as `__call__` does and return activation(gate) * up, [T, outputs / 2].

        The outputs are the gates, then as many ups. activation: a key of
        baton_kernels.reference.activation.ACTIVATIONS.
        """
