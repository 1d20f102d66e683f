"""Activations, and the gate of a gated MLP (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from .quantize import QuantizedRows, RowFormat, quantize_rows_reference

# Takes a tensor, and returns one of the same shape and dtype.
Activation = Callable[[torch.Tensor], torch.Tensor]
# gelu_tanh is the approximation of GELU by tanh. Products compute GATES, which most models have, by themselves.
ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
GATES = ("silu", "gelu_tanh")


def gate_mul_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up: [T, 2 * size], gate first. activation: a key of ACTIVATIONS.

    Returns [T, size]; the activation is rounded to the dtype before the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


def quantize_gate_reference(
    gate_up: torch.Tensor,
    activation: str,
    form: RowFormat,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> QuantizedRows:
    """Return the result of gate_mul_reference as quantize_rows_reference rounds it to 8 bits."""
    return quantize_rows_reference(gate_mul_reference(gate_up, activation), form, scale, zero)


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), with gates of at most `limit` and ups within ± `limit` (OpenAI,
    "gpt-oss-120b & gpt-oss-20b Model Card", 2025)."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class LimitedGate:
    """silu(gate) * up, with a silu of at most `limit` and ups within ± `limit` (StepFun, "Step 3.5 Flash", 2026).

    before: the limit is that of the gate, and not of its silu (DeepSeek-AI, DeepSeek-V4; Tencent, Hy4, 2026).
    """

    limit: float
    before: bool = False


@dataclass(frozen=True)
class NoGate:
    """activation(up): experts have no gates (NVIDIA, "Nemotron 3", 2025). activation: a key of ACTIVATIONS."""

    activation: str


# The function of gates and ups in an expert: one of ACTIVATIONS, or one of these classes.
ExpertGate = ClampedGate | LimitedGate | NoGate | str


def is_gated(gate: ExpertGate | None) -> bool:
    """Whether an expert has a gate for each of its hidden units."""
    return gate is not None and not isinstance(gate, NoGate)


def expert_gate_reference(gate_up: torch.Tensor, gate: ExpertGate) -> torch.Tensor:
    """gate_up: [T, 2 * size], gates first, or [T, size] without gates. Returns [T, size]."""
    if isinstance(gate, NoGate):
        return ACTIVATIONS[gate.activation](gate_up)
    if isinstance(gate, LimitedGate):
        return limited_gate_reference(gate_up, gate)
    return clamped_gate_reference(gate_up, gate) if isinstance(gate, ClampedGate) else gate_mul_reference(gate_up, gate)


def limited_gate_reference(gate_up: torch.Tensor, gate: LimitedGate) -> torch.Tensor:
    """gate_up: [T, 2 * size], gates first. Returns [T, size]."""
    gates, ups = gate_up.chunk(2, dim=-1)
    silus = functional.silu(gates.clamp(max=gate.limit) if gate.before else gates)
    return silus.clamp_(max=gate.limit) * ups.clamp(-gate.limit, gate.limit)


def clamped_gate_reference(gate_up: torch.Tensor, clamp: ClampedGate) -> torch.Tensor:
    """gate_up: [T, 2 * size], gates first. Returns [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * gate * torch.sigmoid(clamp.alpha * gate)
