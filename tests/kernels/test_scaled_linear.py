"""Products of 8-bit rows and weights against float64, for shapes that fill no tile."""

import pytest
import torch

from baton_kernels.kernel_configs import LinearConfig
from baton_kernels.quantize import quantize_rows
from baton_kernels.reference.quantize import QuantizedRows, RowFormat, dequantize_rows_reference
from baton_kernels.reference.scaled_linear import (
    ScaledWeight,
    dequantize_scaled_reference,
    scaled_linear_reference,
)
from baton_kernels.scaled_linear import scaled_linear, scaled_linear_fixed

from .closeness import relative_error

CONFIGS = {
    "one row": LinearConfig(1, 32, 64, 1, 4, 1),
    "tiles": LinearConfig(16, 32, 32, 1, 4, 2),
    "parts": LinearConfig(16, 32, 32, 2, 4, 2),
}


def make(kind: str, outputs: int, inner: int, rows: int, device: torch.device) -> tuple[QuantizedRows, ScaledWeight]:
    x = torch.randn(rows, inner, device=device) + 0.3
    if kind == "fp8 in tiles":
        codes = (torch.randn(outputs, inner, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-outputs // 16), -(-inner // 32), device=device) + 0.1
        return quantize_rows(x, RowFormat(torch.float8_e4m3fn, group=32)), ScaledWeight(codes, scales, (16, 32))
    scales = torch.rand(outputs, 1, device=device) + 0.1
    if kind == "fp8":
        codes = (torch.randn(outputs, inner, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        return quantize_rows(x, RowFormat(torch.float8_e4m3fn)), ScaledWeight(codes, scales, (1, inner))
    codes = torch.randint(-128, 128, (outputs, inner), dtype=torch.int8, device=device)
    form = RowFormat(torch.int8, symmetric=kind == "int8")
    sums = codes.sum(dim=1, dtype=torch.int32)
    return quantize_rows(x, form), ScaledWeight(codes, scales, (1, inner), sums)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["fp8", "fp8 in tiles", "int8", "int8 with a zero"])
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(1, 40, 96), (5, 50, 112)])
def test_products(rows: int, outputs: int, inner: int, kind: str, name: str, device: torch.device) -> None:
    x, weight = make(kind, outputs, inner, rows, device)
    bias = torch.randn(outputs, device=device)
    exact = dequantize_rows_reference(x).double() @ dequantize_scaled_reference(weight, torch.float64).T
    exact += bias.double()
    for _ in range(2):  # the second time shows whether the first has left its counters at zero
        ours = scaled_linear(x, weight, bias, torch.float32, config=CONFIGS[name])
        # Tensor cores add up FP8 with some 14 bits.
        coarse = device.type == "cuda" and "fp8" in kind and name != "one row"
        assert relative_error(ours, exact) < (2**-12 if coarse else 1e-6)
    assert relative_error(scaled_linear_reference(x, weight, bias, torch.float32), exact) < 1e-6
    if name == "tiles":
        # The interpreter cuts bits off instead of rounding.
        assert relative_error(scaled_linear(x, weight, bias, torch.bfloat16), exact) < 2**-7


@pytest.mark.usefixtures("same_sum_anywhere")
def test_fixed_products_do_not_depend_on_the_rows_around(device: torch.device) -> None:
    x, weight = make("int8", 40, 96, 70, device)
    together = scaled_linear_fixed(x, weight, None, torch.float32)
    alone = QuantizedRows(x.codes[66:70].contiguous(), x.scales[66:70].contiguous())
    assert torch.equal(scaled_linear_fixed(alone, weight, None, torch.float32), together[66:70])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["fp8", "fp8 in tiles", "int8 with a zero"])
def test_gated_products(kind: str, name: str, device: torch.device) -> None:
    x, weight = make(kind, 96, 112, 5, device)
    bias = torch.randn(96, device=device)
    exact = dequantize_rows_reference(x).double() @ dequantize_scaled_reference(weight, torch.float64).T
    gate, up = (exact + bias.double()).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    coarse = device.type == "cuda" and "fp8" in kind
    ours = scaled_linear(x, weight, bias, torch.float32, True, CONFIGS[name])
    assert relative_error(ours, expected) < (2**-11 if coarse else 2e-6)
    assert relative_error(scaled_linear_reference(x, weight, bias, torch.float32, True), expected) < 2e-6
    for few in (slice(0, 1), slice(1, 5)):
        part = QuantizedRows(*(None if each is None else each[few].contiguous() for each in x[:3]), x.group)
        fixed = scaled_linear_fixed(part, weight, bias, torch.float32, True)
        assert relative_error(fixed, expected[few]) < (2**-11 if coarse else 2e-6)
