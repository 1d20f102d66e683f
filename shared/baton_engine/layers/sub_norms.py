"""Attention and MLPs with a norm before their last projection (Wang et al., "Foundation Transformers", 2022)."""

from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.shard import Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import Activation

from .attention import Attention
from .linear import Linear
from .norm import RmsNorm


class DividedNorm:
    """An RmsNorm of vectors of which each rank has a part: the inputs of a projection that Rows divides."""

    def __init__(self, source: Source, size: int, eps: float) -> None:
        self._norm = RmsNorm(source, size, eps, part=Rows(source.ranks).inputs(size))
        self._size, self._ranks = size, source.ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, elements of this rank]. Returns a new tensor."""
        if self._ranks.count == 1:
            return self._norm(x)
        return self._norm.given(x, self._ranks.sum(x.float().square().sum(dim=-1)) / self._size)


class SubNormAttention(Attention):
    """norm: of the results of all heads together. others: as in Attention."""

    def __init__(self, norm: DividedNorm, *others: Any) -> None:
        super().__init__(*others)
        self._norm = norm

    def __call__(self, x: InputRows, ctx: Context) -> torch.Tensor:
        attended = ctx.attend(self._layer, self.queries(x, ctx), self._sinks)
        return self._output(self._norm(attended.flatten(1)))


class SubNormMlp:
    """down(norm(activation(gate(x)) * up(x))). gate_up: as in GatedMlp."""

    def __init__(self, gate_up: Linear, norm: DividedNorm, down: Linear, activation: Activation) -> None:
        self._gate_up, self._norm, self._down, self._activation = gate_up, norm, down, activation
        self.inputs = gate_up.inputs

    def __call__(self, x: InputRows) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(self._norm(self._activation(gate).mul_(up)))
