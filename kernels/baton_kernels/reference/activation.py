"""Activations, and the gate of a gated MLP (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

# By the names that transformers gives them, where these differ from other activations of the same name.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def gate_mul_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up: [T, 2 * size], gate first. activation: a key of ACTIVATIONS.

    Returns [T, size]; the activation is rounded to the dtype before the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
