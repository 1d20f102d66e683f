"""A projection to queries, keys and values, of which the values are normalized."""

import torch

from baton_engine.inputs import InputRows

from .linear import Linear
from .norm import UnitNorm


class NormedValues:
    """A projection to queries, keys and values, with a norm without weights of each value head.

    shares_keys: the projection gives no values, which are the norms of its keys.
    """

    def __init__(self, qkv: Linear, norm: UnitNorm, size: int, dim: int, shares_keys: bool = False) -> None:
        """size: elements of this rank's values of a token. dim: of a head."""
        self._qkv, self._norm, self._size, self._dim = qkv, norm, size, dim
        self._shares_keys, self.inputs = shares_keys, qkv.inputs

    def __call__(self, x: InputRows) -> torch.Tensor:
        qkv = self._qkv(x)
        values = self._norm(qkv[:, -self._size :].reshape(-1, self._dim)).view(-1, self._size)
        return torch.cat([qkv if self._shares_keys else qkv[:, : -self._size], values], dim=1)
