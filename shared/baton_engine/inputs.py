"""The forms in which products take their inputs. The operation before a product writes its result in that form."""

from typing import Protocol

import torch

from baton_kernels.reference.norm import PendingNorm, sum_of
from baton_kernels.reference.quantize import QuantizedRows, RowFormat

from .ops import Ops

# Inputs of a product, [T, inputs].
InputRows = torch.Tensor | QuantizedRows | PendingNorm
# The output of a layer or of a part of it, [T, hidden]. A norm at its end may be left to the next norm.
OutputRows = torch.Tensor | PendingNorm


class Inputs(Protocol):
    """The form in which a product takes its inputs. Every product also takes a plain tensor."""

    def norm(
        self, ops: Ops, x: OutputRows, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[InputRows, torch.Tensor]:
        """Compute what pending_norm_reference does."""

    def gate(self, ops: Ops, gate_up: torch.Tensor, activation: str) -> InputRows:
        """Compute what gate_mul_reference does."""


class Numbers:
    """A plain tensor in the dtype that the engine computes in."""

    def norm(
        self, ops: Ops, x: OutputRows, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[InputRows, torch.Tensor]:
        return ops.add_rms_norm(x, residual, weight, eps), sum_of(x, residual)

    def gate(self, ops: Ops, gate_up: torch.Tensor, activation: str) -> InputRows:
        return ops.gate_mul(gate_up, activation)


NUMBERS = Numbers()


class NormedNumbers(Numbers):
    """A plain tensor, or a norm that the product computes itself, for rows of at most `most` elements."""

    def __init__(self, most: int) -> None:
        self._most = most

    def norm(
        self, ops: Ops, x: OutputRows, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[InputRows, torch.Tensor]:
        return ops.pending_norm(x, residual, weight, eps, self._most)


class EightBits:
    """Rows that are rounded to 8 bits. scale, zero: as in quantize_rows_reference."""

    def __init__(self, form: RowFormat, scale: torch.Tensor | None, zero: torch.Tensor | None) -> None:
        self._form, self._scale, self._zero = form, scale, zero

    def rounded(self, ops: Ops, x: InputRows) -> QuantizedRows:
        """Return inputs of a product in this form."""
        return x if isinstance(x, QuantizedRows) else ops.quantize_rows(x, self._form, self._scale, self._zero)

    def norm(
        self, ops: Ops, x: OutputRows, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[InputRows, torch.Tensor]:
        rows = ops.quantize_norm(x, residual, weight, eps, self._form, self._scale, self._zero)
        return rows, sum_of(x, residual)

    def gate(self, ops: Ops, gate_up: torch.Tensor, activation: str) -> InputRows:
        return ops.quantize_gate(gate_up, activation, self._form, self._scale, self._zero)


def inputs_of(part: object) -> Inputs:
    """Return the form that a part of a layer takes: its attribute `inputs`. Parts without it take plain tensors."""
    found: Inputs = getattr(part, "inputs", NUMBERS)
    return found
