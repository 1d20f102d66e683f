"""Weights and activations in 8 bits."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from baton_engine.config import ConfigError
from baton_engine.experts_method import ExpertNames, ExpertsMethod
from baton_engine.inputs import EightBits, InputRows, Inputs
from baton_engine.ops import Ops
from baton_engine.source import Outputs, Product, Source
from baton_kernels.reference.quantize import RowFormat, dequantize_rows_reference
from baton_kernels.reference.scaled_linear import ScaledWeight, dequantize_scaled_reference

from .coded_method import CodedMethod
from .dense import Dense, in_order
from .device import check_fp8_if
from .int8_on_cpu import MOST_INPUTS, Int8OnCpu, has_int8_products
from .quantized_experts import CodedExperts, read_experts
from .scaled_part import Part
from .side_by_side import SideBySide, merge, same

# Up to this many rows the product also computes the gate. For more rows one kernel computes the gate and the rounding.
_GATED_ROWS = 32


class Scaled:
    """The product of 8-bit numbers."""

    def __init__(self, part: Part, bias: torch.Tensor | None, form: RowFormat, dtype: torch.dtype, ops: Ops) -> None:
        self.inputs = EightBits(form, part.scale, part.zero)
        self._weight, self._bias, self._dtype, self._ops = part.weight, bias, dtype, ops

    def __call__(self, x: InputRows, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.inputs.rounded(self._ops, x)
        result = self._ops.scaled_linear(rows, self._weight, self._bias, self._dtype)
        return result if out is None else out.copy_(result)

    def gated(self, x: InputRows, activation: str, into: Inputs) -> InputRows:
        rows = self.inputs.rounded(self._ops, x)
        if activation == "silu" and len(rows.codes) <= _GATED_ROWS:
            return self._ops.scaled_linear(rows, self._weight, self._bias, self._dtype, True)
        return into.gate(self._ops, self(rows), activation)


class Rounded:
    """The product with a weight that is held in the engine's dtype; activations are still rounded to 8 bits."""

    def __init__(self, part: Part, bias: torch.Tensor | None, form: RowFormat, dtype: torch.dtype, ops: Ops) -> None:
        self._dense = Dense(dequantize_scaled_reference(part.weight, dtype), bias, ops)
        self.inputs = EightBits(form, part.scale, part.zero)
        self._dtype, self._ops = dtype, ops

    def __call__(self, x: InputRows, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._dense(self._round(x), out)

    def gated(self, x: InputRows, activation: str, into: Inputs) -> InputRows:
        return self._dense.gated(self._round(x), activation, into)

    def _round(self, x: InputRows) -> torch.Tensor:
        return dequantize_rows_reference(self.inputs.rounded(self._ops, x)).to(self._dtype)


class ScaledMethod(CodedMethod[Part], frozen=True):
    """The part of a Method that all formats of such weights share. rows: how activations are rounded."""

    rows: RowFormat

    def dense(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        return dequantize_scaled_reference(part.weight, dtype)

    def experts(self, source: Source, names: ExpertNames, experts: int, hidden: int, size: int) -> ExpertsMethod:
        """As in Method."""
        check_fp8_if(self.rows.dtype, source.device)
        scales: list[torch.Tensor] = []

        def read(
            source: Source, taken: list[Outputs], inputs: int, columns: slice
        ) -> ScaledWeight | torch.Tensor:  # fmt: skip
            weight, scale = self._read_expert(source, taken, inputs, columns)
            if scale is not None:
                scales.append(scale.float().reshape(()))
            return weight

        held = read_experts(source, names, experts, hidden, size, read)
        # All experts' first products are read before the second ones.
        input_scales = torch.stack(scales).view(2, -1) if scales else None
        return CodedExperts(replace(held, rows=self.rows, input_scales=input_scales), source.ops)

    def _read_expert(
        self, source: Source, taken: list[Outputs], inputs: int, columns: slice
    ) -> tuple[ScaledWeight | torch.Tensor, torch.Tensor | None]:
        """Return the weight of one product of an expert, and the scale of all its inputs; None = each row has one."""
        parts = self.read_all(source, taken, inputs, columns)
        scale, name = parts[0].scale, source.full_name(taken[0].name)
        if not self.rows.symmetric:
            raise ConfigError(f"{name} is an expert of activations with zeros; Baton serves symmetric activations")
        if not all(same(part.scale, scale) for part in parts):
            raise ConfigError(f"{name} and the ups of its expert have different scales of activations, which is not "
                              "served")  # fmt: skip
        weight = _stack([part.weight for part in parts])
        return weight if source.ops.keeps_codes else dequantize_scaled_reference(weight, source.dtype), scale

    def _kind(self, source: Source, inputs: int) -> type[Scaled] | type[Rounded] | type[Int8OnCpu]:
        if source.ops.keeps_codes:
            return Scaled
        on_cpu = source.device.type == "cpu" and self.rows.dtype == torch.int8 and inputs <= MOST_INPUTS
        return Int8OnCpu if on_cpu and has_int8_products() else Rounded

    def product(
        self, parts: list[Part], bias: torch.Tensor | None, order: Sequence[int] | None, source: Source
    ) -> Product:
        check_fp8_if(self.rows.dtype, source.device)
        kind = self._kind(source, parts[0].weight.codes.shape[1])
        products: list[Product] = []
        first = 0
        runs = merge(parts, lambda one, other: same(one.scale, other.scale) and same(one.zero, other.zero))
        own_order = order if len(runs) == 1 else None
        for run in runs:
            weight = _stack([part.weight for part in run])
            outputs = len(weight.codes)
            if own_order is not None:
                weight = _reorder(weight, torch.tensor(own_order, device=source.device))
            if not self.rows.symmetric:
                weight = weight._replace(sums=weight.codes.sum(dim=1, dtype=torch.int32))
            added = None if bias is None else in_order(bias[first : first + outputs], own_order)
            products.append(kind(run[0]._replace(weight=weight), added, self.rows, source.dtype, source.ops))
            first += outputs
        return products[0] if len(products) == 1 else SideBySide(products, source, order)


def _stack(weights: list[ScaledWeight]) -> ScaledWeight:
    """Return weights as one, along their outputs."""
    if len(weights) == 1:
        return weights[0]
    # A tile that has outputs of two projections would have two scales, so each output gets a scale of its own.
    if any(len(weight.codes) % weight.tile[0] or weight.tile != weights[0].tile for weight in weights):
        weights = [_by_output(weight) for weight in weights]
    codes, scales = torch.cat([each.codes for each in weights]), torch.cat([each.scales for each in weights])
    return ScaledWeight(codes, scales, weights[0].tile)


def _by_output(weight: ScaledWeight) -> ScaledWeight:
    scales = weight.scales.repeat_interleave(weight.tile[0], dim=0)[: len(weight.codes)]
    return weight._replace(scales=scales.contiguous(), tile=(1, weight.tile[1]))


def _reorder(weight: ScaledWeight, index: torch.Tensor) -> ScaledWeight:
    weight = _by_output(weight)
    return weight._replace(codes=weight.codes[index], scales=weight.scales[index])
