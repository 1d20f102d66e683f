"""A projection to queries, keys and values, of which the values are multiplied by a factor."""

import torch

from baton_engine.inputs import InputRows

from .linear import Linear


class ScaledValues:
    """A projection to queries, keys and values, with a factor of the values."""

    def __init__(self, qkv: Linear, size: int, factor: float) -> None:
        """size: elements of this rank's values of a token."""
        self._qkv, self._size, self._factor, self.inputs = qkv, size, factor, qkv.inputs

    def __call__(self, x: InputRows) -> torch.Tensor:
        qkv = self._qkv(x)
        qkv[:, -self._size :].mul_(self._factor)
        return qkv
