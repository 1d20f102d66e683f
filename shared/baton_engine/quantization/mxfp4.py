"""MXFP4 of the OCP Microscaling specification, as gpt-oss (OpenAI, 2025) stores its experts."""

from collections.abc import Callable

import torch

from baton_engine.experts_method import ExpertNames, ExpertsMethod
from baton_engine.source import Method, Source
from baton_kernels.reference.activation import ClampedGate
from baton_kernels.reference.experts import ExpertWeights
from baton_kernels.reference.grouped_linear import GroupedWeight, dequantize_grouped_reference, held_exponents
from baton_kernels.reference.quantized_experts import QuantizedExperts

from .dense import DENSE
from .dense_experts import DenseExperts, expert_biases
from .fields import QuantizationFields
from .grouped import GroupedMethod, Part, check_group, pack_codes
from .names import NotConverted
from .packed import divide
from .quantized_experts import CodedExperts

GROUP = 32


class Mxfp4(GroupedMethod, frozen=True):
    """Codes `NAME_blocks` [..., outputs, groups, 16], two in a byte, and exponents `NAME_scales` [..., outputs,
    groups]."""

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        return Part(read_blocks(source, name, (outputs, inputs), (rows, columns)))

    def experts(self, source: Source, names: ExpertNames, experts: int, hidden: int, size: int) -> ExpertsMethod:
        if not isinstance(names.activation, ClampedGate) or "gate_up_proj_blocks" not in source:
            return super().experts(source, names, experts, hidden, size)
        # gpt-oss stores all experts of a layer in few tensors, which take less time to read as a whole.
        units, numbers = source.own_units(size), source.own_experts(experts)
        own, all_inputs = slice(numbers.start, numbers.stop), slice(0, hidden)
        part = own, slice(2 * units.start, 2 * units.stop), all_inputs
        both = read_blocks(source, "gate_up_proj", (experts, 2 * size, hidden), part)
        # Gates and ups are stored in turn.
        codes, scales = (torch.cat([each[:, ::2], each[:, 1::2]], dim=1) for each in (both.codes, both.scales))
        gate_up = both._replace(codes=codes, scales=scales)
        down = read_blocks(source, "down_proj", (experts, hidden, size), (own, slice(0, hidden), units))
        biases = expert_biases(source, names, experts, hidden, size)
        if source.ops.keeps_codes:
            held = QuantizedExperts(gate_up, down, *biases, names.activation, layer_experts=experts)
            return CodedExperts(held, source.ops)
        gates, downs = (dequantize_stack(weight, source.dtype) for weight in (gate_up, down))
        return DenseExperts(ExpertWeights(gates, downs, *biases, names.activation, experts), source.ops)


def read_blocks(
    source: Source, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None = None
) -> GroupedWeight:
    """Return a weight, or a stack of such weights: [..., outputs, inputs]. part: of it, for each of these axes."""
    *others, inputs = shape
    *axes, columns = part or tuple(slice(0, size) for size in shape)
    check_group(source.full_name(name), GROUP, inputs, columns)
    groups = divide(columns, GROUP, name)
    size = *others, inputs // GROUP
    pairs = source.take(f"{name}_blocks", (*size, GROUP // 2), (*axes, groups, slice(0, GROUP // 2)), torch.uint8)
    scales = source.take(f"{name}_scales", size, (*axes, groups), torch.uint8)
    return GroupedWeight("e2m1", pack_codes(split_pairs(pairs.flatten(-2)), 4), held_exponents(scales))


def dequantize_stack(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return a stack of weights in a dtype, one after another: all of them in float32 would take twice the memory."""
    count, outputs, _ = weight.codes.shape
    numbers = torch.empty(count, outputs, weight.inputs, dtype=dtype, device=weight.codes.device)
    for number in range(count):
        numbers[number] = dequantize_grouped_reference(weight.at(number), dtype)
    return numbers


def split_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """Return the codes of bytes [..., n] as [..., 2 * n]; the low half of a byte comes first."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def read_policy(fields: QuantizationFields) -> Callable[[str, bool, Callable[[str], bool]], Method]:
    left_out = NotConverted(fields.names("modules_to_not_convert"))

    def policy(name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        return DENSE if left_out.has(name) or not stored(f"{name}_blocks") else Mxfp4()

    return policy
