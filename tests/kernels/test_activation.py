"""The gate of a gated MLP."""

import math
from collections.abc import Callable

import pytest
import torch

from .closeness import relative_error
from .test_quantize import FORMATS, same


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-1.702 * x).exp())


def relu(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0)


def relu2(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) ** 2


@pytest.mark.parametrize("activation", [silu, gelu_tanh, gelu, quick_gelu, relu, relu2])
@pytest.mark.parametrize("size", [32, 100, 3000])
def test_matches_float64(device: torch.device, size: int, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from baton_kernels.activation import gate_mul
    from baton_kernels.reference.activation import gate_mul_reference

    gate_up = torch.randn(4, 2 * size, device=device) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = activation(gate) * up
    for function in (gate_mul, gate_mul_reference):
        assert relative_error(function(gate_up, activation.__name__), expected) < 1e-6


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
def test_gates_that_are_rounded_at_once_have_the_same_codes(device: torch.device, activation: str, name: str) -> None:
    from baton_kernels.activation import gate_mul, quantize_gate
    from baton_kernels.quantize import quantize_rows

    for size in (96, 80):
        gate_up, form = torch.randn(5, 2 * size, device=device) * 4, FORMATS[name]
        gate_up[1, 2] = float("inf")
        rounded = quantize_gate(gate_up, activation, form)
        assert same(rounded, quantize_rows(gate_mul(gate_up, activation), form))
        assert rounded.scales.isnan().any(dim=1).tolist() == [False, True, False, False, False]
