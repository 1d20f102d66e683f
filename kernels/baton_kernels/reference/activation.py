"""The gate of a gated MLP: silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import torch


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [T, 2 * size], gate first. Returns [T, size]; silu is rounded to the dtype before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
