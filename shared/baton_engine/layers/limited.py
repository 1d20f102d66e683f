"""Projections whose results are clipped."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.inputs import InputRows, inputs_of


class Limited:
    """A projection whose results are clipped to [-limit, limit]."""

    def __init__(self, projection: Callable[[Any], torch.Tensor], limit: float) -> None:
        self._projection, self._limit = projection, limit
        self.inputs = inputs_of(projection)

    def __call__(self, x: InputRows) -> torch.Tensor:
        return self._projection(x).clamp_(-self._limit, self._limit)
