"""Experts whose weights are not quantized."""

from typing import Self

import torch

from baton_engine.experts_method import ExpertNames
from baton_engine.ops import Ops
from baton_engine.source import Source
from baton_kernels.reference.experts import ExpertWeights


class DenseExperts:
    """The weights of experts in the dtype that the engine computes in.

    Each rank has some of the experts, or a part of every expert's hidden units, so the caller must add up the results
    of the ranks. Experts are copied into place one by one, since two copies of all may not fit into device memory.
    """

    def __init__(self, held: ExpertWeights, ops: Ops) -> None:
        self._held, self._ops = held, ops

    @classmethod
    def load(cls, source: Source, names: ExpertNames, experts: int, hidden: int, size: int) -> Self:
        """As in Method, from weights that are stored in any way."""
        units, numbers = source.own_units(size), source.own_experts(experts)
        own = units.stop - units.start
        rows = len(names.inner) * own
        gate_up = torch.empty(len(numbers), rows, hidden, dtype=source.dtype, device=source.device)
        down = torch.empty(len(numbers), hidden, own, dtype=source.dtype, device=source.device)
        for place, number in enumerate(numbers):
            for first, name in zip(range(0, rows, own), names.inner, strict=True):
                weight = source.at(str(number)).weight(name, size, hidden, rows=units)
                gate_up[place, first : first + own] = weight
        for place, number in enumerate(numbers):
            down[place] = source.at(str(number)).weight(names.down, hidden, size, columns=units)
        biases = expert_biases(source, names, experts, hidden, size)
        return cls(ExpertWeights(gate_up, down, *biases, names.activation, experts), source.ops)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self._ops.run_experts(x, self._held, weights, experts)


def expert_biases(
    source: Source, names: ExpertNames, experts: int, hidden: int, size: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the biases of experts, [experts of this rank, rows of its gates and ups] and [experts of this rank,
    hidden]; None = 0. As the ranks' results are added up, only the first of the ranks that share an expert has the
    second bias; the others have zeros."""
    if not names.bias:
        return None, None
    units, numbers = source.own_units(size), source.own_experts(experts)
    own = units.stop - units.start
    rows = len(names.inner) * own
    gate_up = torch.empty(len(numbers), rows, dtype=source.dtype, device=source.device)
    down = torch.empty(len(numbers), hidden, dtype=source.dtype, device=source.device)
    for place, number in enumerate(numbers):
        expert = source.at(str(number))
        for first, name in zip(range(0, rows, own), names.inner, strict=True):
            gate_up[place, first : first + own] = expert.take(f"{name}.bias", (size,), (units,))
        down[place] = expert.take(f"{names.down}.bias", (hidden,))
    return gate_up, down.zero_() if units.start else down
