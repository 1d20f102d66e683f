"""Which part of a linear layer a rank computes, and how the parts of all ranks become the result."""

from typing import Protocol

import torch


class Shard(Protocol):
    def outputs(self, size: int) -> slice:
        """Return which of `size` outputs this rank computes."""

    def inputs(self, size: int) -> slice:
        """Return which of `size` inputs this rank multiplies."""

    def join(self, y: torch.Tensor) -> torch.Tensor:
        """Return the layer's result. y: the part that this rank has computed, [T, outputs of this rank]."""


class Replicated:
    """Each rank computes the whole layer."""

    def outputs(self, size: int) -> slice:
        return slice(0, size)

    def inputs(self, size: int) -> slice:
        return slice(0, size)

    def join(self, y: torch.Tensor) -> torch.Tensor:
        return y


REPLICATED = Replicated()
