"""Activations, and the gate of a gated MLP (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

# gelu_tanh is the approximation of GELU by tanh. gate_mul has kernels for the gates that models have: GATES.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
GATES = ("silu", "gelu_tanh")


def gate_mul_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up: [T, 2 * size], gate first. activation: one of GATES.

    Returns [T, size]; the activation is rounded to the dtype before the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
