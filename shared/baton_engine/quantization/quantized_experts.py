"""Experts whose weights are quantized."""

from collections.abc import Callable, Iterable

import torch

from baton_engine.experts_method import ExpertNames
from baton_engine.ops import Ops
from baton_engine.source import Outputs, Source
from baton_kernels.reference.grouped_linear import GroupedWeight, exponents_to_scales
from baton_kernels.reference.quantized_experts import ExpertCodes, QuantizedExperts
from baton_kernels.reference.scaled_linear import ScaledWeight

from .dense_experts import expert_biases


class CodedExperts:
    """Experts whose weights stay in their codes, or whose inputs are rounded."""

    def __init__(self, held: QuantizedExperts, ops: Ops) -> None:
        self._held, self._ops = held, ops

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self._ops.run_quantized_experts(x, self._held, weights, experts)


# Reads parts of projections of one expert, as Method.load has them, and stacks them along their outputs.
Read = Callable[[Source, list[Outputs], int, slice], ExpertCodes]


def read_experts(
    source: Source, names: ExpertNames, experts: int, hidden: int, size: int, read: Read
) -> QuantizedExperts:
    """Return this rank's part of a layer's experts. The checkpoint stores them by the expert's number.

    Tensors are taken in the order in which DenseExperts takes them.
    """
    units, whole, own = source.own_units(size), slice(0, hidden), source.own_experts(experts)
    both = [Outputs(name, size, units) for name in names.inner]
    out = [Outputs(names.down, hidden, whole)]
    gate_up = join((read(source.at(str(number)), both, hidden, whole) for number in own), len(own))
    down = join((read(source.at(str(number)), out, size, units) for number in own), len(own))
    biases = expert_biases(source, names, experts, hidden, size)
    return QuantizedExperts(gate_up, down, *biases, names.activation, layer_experts=experts)


def join(weights: Iterable[ExpertCodes], count: int) -> ExpertCodes:
    """Return weights of one kind as a stack, with their number as the first dimension. count: how many there are.

    Codes are copied into place one by one, since a second copy of all may not fit into the device's memory.
    """
    stacked, coded = torch.empty(0), []
    for place, weight in enumerate(weights):
        codes = weight if isinstance(weight, torch.Tensor) else weight.codes
        if place == 0:
            stacked = codes.new_empty(count, *codes.shape)
        stacked[place] = codes
        if not isinstance(weight, torch.Tensor):
            coded.append(weight._replace(codes=stacked[place]))
    scaled = [weight for weight in coded if isinstance(weight, ScaledWeight)]
    if scaled:
        return scaled[0]._replace(codes=stacked, scales=torch.stack([weight.scales for weight in scaled]))
    grouped = [weight for weight in coded if isinstance(weight, GroupedWeight)]
    if grouped:
        zeros = [weight.zeros for weight in grouped if weight.zeros is not None]
        factors = [weight.factors for weight in grouped if weight.factors is not None]
        return grouped[0]._replace(
            codes=stacked,
            scales=torch.stack(_of_one_kind(grouped)),
            zeros=torch.stack(zeros) if zeros else None,
            factors=torch.stack(factors) if factors else None,
        )
    return stacked


def _of_one_kind(weights: list[GroupedWeight]) -> list[torch.Tensor]:
    """Return the scales of weights, as exponents only if all are."""
    scales = [weight.scales for weight in weights]
    if len({each.dtype for each in scales}) == 1:
        return scales
    return [exponents_to_scales(each) if each.dtype == torch.uint8 else each for each in scales]
