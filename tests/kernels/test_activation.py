"""The gate of a gated MLP."""

import pytest
import torch

from .closeness import relative_error


@pytest.mark.parametrize("size", [32, 100, 3000])
def test_matches_float64(device: torch.device, size: int) -> None:
    from baton_kernels.activation import silu_mul
    from baton_kernels.reference.activation import silu_mul_reference

    gate_up = torch.randn(4, 2 * size, device=device) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / (1 + (-gate).exp()) * up
    for function in (silu_mul, silu_mul_reference):
        assert relative_error(function(gate_up), expected) < 1e-6
