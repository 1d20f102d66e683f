"""Experts whose weights are quantized."""

from collections.abc import Callable, Sequence

import torch

from baton_engine.config import ConfigError
from baton_engine.experts_method import ExpertNames
from baton_engine.ops import Ops
from baton_engine.source import Outputs, Source
from baton_kernels.reference.grouped_linear import GroupedWeight, exponents_to_scales
from baton_kernels.reference.quantized_experts import QuantizedExperts
from baton_kernels.reference.scaled_linear import ScaledWeight


class CodedExperts:
    """Experts whose weights stay in their codes, or whose inputs are rounded."""

    def __init__(self, held: QuantizedExperts, ops: Ops) -> None:
        self._held, self._ops = held, ops

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return self._ops.run_quantized_experts(x, self._held, weights, experts)


def not_joined(source: Source) -> ConfigError:
    """Return the error for experts that are stored together in a format that has no layout for that."""
    return ConfigError(
        f"{source.full_name('gate_up_proj')} has the weights of all experts together, which is served in 16 bits and "
        "in MXFP4"
    )


# Reads parts of projections of one expert, as Method.load has them, and stacks them along their outputs.
Read = Callable[[Source, list[Outputs], int, slice], GroupedWeight | ScaledWeight | torch.Tensor]


def read_experts(
    source: Source, names: ExpertNames, experts: int, hidden: int, size: int, read: Read
) -> QuantizedExperts:
    """Return what this rank has of a layer's experts, which a checkpoint stores at the expert's number.

    Tensors are taken in the order in which DenseExperts takes them, one expert after another.
    """
    units, whole = source.own_units(size), slice(0, hidden)
    gate_up, down = [], []
    for number in source.own_experts(experts):
        expert = source.at(str(number))
        both = [Outputs(names.gate, size, units), Outputs(names.up, size, units)]
        gate_up.append(read(expert, both, hidden, whole))
        down.append(read(expert, [Outputs(names.down, hidden, whole)], size, units))
    return QuantizedExperts(join(gate_up), join(down), layer_experts=experts)


def join(
    weights: Sequence[GroupedWeight | ScaledWeight | torch.Tensor],
) -> GroupedWeight | ScaledWeight | torch.Tensor:
    """Return weights of one kind as a stack, with their number as the first dimension."""
    first = weights[0]
    if isinstance(first, torch.Tensor):
        return torch.stack([weight for weight in weights if isinstance(weight, torch.Tensor)])
    if isinstance(first, ScaledWeight):
        scaled = [weight for weight in weights if isinstance(weight, ScaledWeight)]
        codes, scales = torch.stack([each.codes for each in scaled]), torch.stack([each.scales for each in scaled])
        return ScaledWeight(codes, scales, first.tile)
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    codes, scales = torch.stack([each.codes for each in grouped]), torch.stack(_of_one_kind(grouped))
    zeros = None if first.zeros is None else torch.stack([each.zeros for each in grouped if each.zeros is not None])
    return first._replace(codes=codes, scales=scales, zeros=zeros)


def _of_one_kind(weights: list[GroupedWeight]) -> list[torch.Tensor]:
    """Return the scales of weights, as exponents only if all are."""
    scales = [weight.scales for weight in weights]
    if len({each.dtype for each in scales}) == 1:
        return scales
    return [exponents_to_scales(each) if each.dtype == torch.uint8 else each for each in scales]
