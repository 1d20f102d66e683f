"""Weights that are not quantized."""

from collections.abc import Callable, Sequence

import msgspec
import torch

from baton_engine.experts_method import ExpertNames
from baton_engine.inputs import NUMBERS, InputRows, Inputs, NormedNumbers
from baton_engine.ops import Ops
from baton_engine.source import Outputs, Source
from baton_kernels.reference.activation import GATES
from baton_kernels.reference.norm import PendingNorm

from .dense_experts import DenseExperts

# Each program of a product reads the row and the norm's weight again, beside the weights of only a few outputs.
_MOST_NORMED = 2048
_NORMED = NormedNumbers(_MOST_NORMED)


class Dense:
    """A weight [outputs, inputs] in the dtype that the engine computes in."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> None:
        self._bias = bias
        self._ops = ops
        self._packed = _pack(weight)
        self._weight = weight if self._packed is None else None
        self.inputs: Inputs = _NORMED if self._packed is None else NUMBERS

    def __call__(self, x: torch.Tensor | PendingNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._weight is None:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return result if out is None else out.copy_(result)
        return self._ops.linear(x, self._weight, self._bias, None, out)

    def gated(self, x: torch.Tensor | PendingNorm, activation: str, into: Inputs) -> InputRows:
        if self._weight is None or activation not in GATES:
            return into.gate(self._ops, self(x), activation)
        return self._ops.linear(x, self._weight, self._bias, activation)


class DenseMethod(msgspec.Struct, frozen=True):
    """`NAME.weight` in a floating-point dtype."""

    def load(
        self,
        source: Source,
        taken: list[Outputs],
        inputs: int,
        columns: slice,
        bias: bool,
        order: Sequence[int] | None,
        transposed: bool,
    ) -> Dense:
        weights = []
        for name, size, rows in taken:
            if transposed:
                weights.append(source.take(f"{name}.weight", (inputs, size), (columns, rows)).t())
            else:
                weights.append(source.take(f"{name}.weight", (size, inputs), (rows, columns)))
        weight = weights[0] if len(weights) == 1 else _stack(weights)
        added = in_order(load_biases(source, taken), order) if bias else None
        return Dense(in_order(weight, order).contiguous(), added, source.ops)

    def weight(self, source: Source, taken: Outputs, inputs: int, columns: slice) -> torch.Tensor:
        return source.take(f"{taken.name}.weight", (taken.size, inputs), (taken.rows, columns))

    def experts(self, source: Source, names: ExpertNames, experts: int, hidden: int, size: int) -> DenseExperts:
        return DenseExperts.load(source, names, experts, hidden, size)


DENSE = DenseMethod()


def as_stored(name: str, sensitive: bool, stored: Callable[[str], bool]) -> DenseMethod:
    """The policy of a checkpoint that is not quantized."""
    return DENSE


def load_biases(source: Source, taken: list[Outputs]) -> torch.Tensor:
    """Return the biases of projections, which no format quantizes, one after another."""
    return torch.cat([source.take(f"{name}.bias", (size,), (rows,)) for name, size, rows in taken])


def in_order(outputs: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """Return what a tensor has for each output, in the order that Method.load is asked for."""
    return outputs if order is None else outputs[torch.tensor(order, device=outputs.device)]


def _stack(weights: list[torch.Tensor]) -> torch.Tensor:
    """Return weights as one, along their outputs.

    For tensors without memory, torch.cat imports torch's compiler, which takes 150 MB.
    """
    stacked = weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1])
    first = 0
    for weight in weights:
        stacked[first : first + len(weight)] = weight
        first += len(weight)
    return stacked


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight in oneDNN's blocked layout where that exists.

    On a CPU the product is then several times as fast as with the plain layout for small batches, and 1.2 times for
    large ones.
    """
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed
