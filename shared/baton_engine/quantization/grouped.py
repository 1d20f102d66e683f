"""Weights of 4 or 8 bits in groups, with activations that are not quantized."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from baton_engine.config import ConfigError
from baton_engine.experts_method import ExpertNames, ExpertsMethod
from baton_engine.inputs import NUMBERS, InputRows, Inputs
from baton_engine.ops import Ops
from baton_engine.source import Outputs, Product, Source
from baton_kernels.reference.grouped_linear import (
    BLOCK,
    GroupedWeight,
    dequantize_grouped_reference,
    pack_four_bits,
)

from .coded_method import CodedMethod
from .dense import Dense, in_order
from .dense_experts import DenseExperts
from .device import check_fp8
from .quantized_experts import CodedExperts, read_experts
from .side_by_side import SideBySide, merge, same


class Part(NamedTuple):
    """The part of one projection that a rank has. columns: for each column of the weight the index of its input; None =
    the same order."""

    weight: GroupedWeight
    columns: torch.Tensor | None = None

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight with its columns in the order of the inputs, [outputs, inputs]."""
        weight = dequantize_grouped_reference(self.weight, dtype)
        if self.columns is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.columns, weight)


class Grouped:
    """The product with a weight that stays in its codes."""

    inputs: Inputs = NUMBERS

    def __init__(self, part: Part, bias: torch.Tensor | None, ops: Ops) -> None:
        self._weight, self._columns = part
        self._bias = bias
        self._ops = ops

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        result = self._ops.grouped_linear(self._ordered(x), self._weight, self._bias)
        return result if out is None else out.copy_(result)

    def gated(self, x: torch.Tensor, activation: str, into: Inputs) -> InputRows:
        if activation != "silu":
            return into.gate(self._ops, self(x), activation)
        return self._ops.grouped_linear(self._ordered(x), self._weight, self._bias, True)

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._columns is None else x.index_select(1, self._columns)


class GroupedMethod(CodedMethod[Part], frozen=True):
    """The part of a Method that all formats of such weights share."""

    def dense(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        return part.dense(dtype)

    def product(
        self, parts: list[Part], bias: torch.Tensor | None, order: Sequence[int] | None, source: Source
    ) -> Product:
        if not source.ops.keeps_codes:
            dense = torch.cat([part.dense(source.dtype) for part in parts])
            return Dense(in_order(dense, order), None if bias is None else in_order(bias, order), source.ops)
        check_kind(parts[0].weight, source)
        products, first = [], 0
        runs = merge(parts, lambda one, other: same(one.columns, other.columns) and _alike(one.weight, other.weight))
        own_order = order if len(runs) == 1 else None
        for run in runs:
            weight = stack([part.weight for part in run])
            outputs = len(weight.codes)
            if own_order is not None:
                weight = weight.at(torch.tensor(own_order, device=source.device))
            added = None if bias is None else in_order(bias[first : first + outputs], own_order)
            products.append(Grouped(Part(weight, run[0].columns), added, source.ops))
            first += outputs
        return products[0] if len(products) == 1 else SideBySide(products, source, order)

    def experts(self, source: Source, names: ExpertNames, experts: int, hidden: int, size: int) -> ExpertsMethod:
        """As in Method."""
        if not source.ops.keeps_codes:
            return DenseExperts.load(source, names, experts, hidden, size)
        held = read_experts(source, names, experts, hidden, size, self._read_expert)
        check_kind(held.gate_up, source)
        return CodedExperts(held, source.ops)

    def _read_expert(self, source: Source, taken: list[Outputs], inputs: int, columns: slice) -> GroupedWeight:
        parts = self.read_all(source, taken, inputs, columns)
        if any(part.columns is not None for part in parts):
            name = source.full_name(taken[0].name)
            raise ConfigError(f"{name} has inputs in order of activation (desc_act, actorder), which is not served for "
                              "experts on a GPU")  # fmt: skip
        return stack([part.weight for part in parts])


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes [outputs, inputs] uint8 of 4 or 8 bits as GroupedWeight holds them."""
    return pack_four_bits(codes) if bits == 4 else codes.contiguous()


def check_group(name: str, group: int, inputs: int, columns: slice) -> int:
    """Return the number of columns of a group; -1 stands for all inputs. columns: those that are read.

    Raises ConfigError for groups that are not served.
    """
    size = inputs if group == -1 else group
    if size < 1 or inputs % size or size % BLOCK:
        raise ConfigError(
            f"{name} has {inputs} inputs in groups of {size}; groups must fill the inputs and have a multiple of "
            f"{BLOCK} inputs"
        )
    if columns.start % size or (columns.stop - columns.start) % size:
        raise ConfigError(f"{name} cannot be divided among ranks at inputs {columns.start} and {columns.stop}: its "
                          f"groups have {size} inputs")  # fmt: skip
    return size


def check_kind(weight: object, source: Source) -> None:
    """Raise ConfigError for a weight that the source's device cannot decode."""
    if isinstance(weight, GroupedWeight) and weight.kind == "fp8":
        check_fp8(source.device)


def stack(weights: list[GroupedWeight]) -> GroupedWeight:
    """Return weights of one kind as one, along their outputs."""
    if len(weights) == 1:
        return weights[0]
    codes, scales = torch.cat([each.codes for each in weights]), torch.cat([each.scales for each in weights])
    zeros = [each.zeros for each in weights if each.zeros is not None]
    factors = [each.factors for each in weights if each.factors is not None]
    return weights[0]._replace(
        codes=codes,
        scales=scales,
        zeros=torch.cat(zeros) if zeros else None,
        factors=torch.cat(factors) if factors else None,
    )


def _alike(one: GroupedWeight, other: GroupedWeight) -> bool:
    """Whether two weights can be stacked."""
    return (
        one.kind == other.kind
        and one.scales.dtype == other.scales.dtype
        and one.scales.shape[1] == other.scales.shape[1]
        and (one.zeros is None) == (other.zeros is None)
        and same(one.table, other.table)
    )
