"""The source that layers are built from: the tensors of a checkpoint and the operations of a device."""

from typing import Protocol

import torch

from .ops import Ops


class Tensors(Protocol):
    """The tensors of a checkpoint. dtype: that of the engine. device: where `take` puts them."""

    dtype: torch.dtype
    device: torch.device

    def __contains__(self, name: str) -> bool: ...

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor as Weights.take does."""


class Source:
    """The tensors of a checkpoint whose names begin with a prefix."""

    def __init__(self, weights: Tensors, ops: Ops, prefix: str = "") -> None:
        self.ops = ops
        self.dtype = weights.dtype
        self.device = weights.device
        self._weights = weights
        self._prefix = prefix

    def at(self, name: str) -> "Source":
        """Return the source of the tensors whose names go on with `name` and a dot."""
        return Source(self._weights, self.ops, f"{self._prefix}{name}.")

    def __contains__(self, name: str) -> bool:
        return f"{self._prefix}{name}" in self._weights

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        part: tuple[slice, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return a tensor, or a part of it, as Weights.take does; in the engine's dtype unless another is given."""
        return self._weights.take(f"{self._prefix}{name}", shape, part, dtype or self.dtype)
