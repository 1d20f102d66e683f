"""Products of 16 and 8 bits on Hopper against float64 where there is such a GPU."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from baton_common.cores import available_cores
from baton_engine.compilation import compiling_ahead
from baton_kernels.hopper_numbers import fits_hopper, fits_hopper_scaled, hopper_numbers
from baton_kernels.kernel_configs import LinearConfig, Product
from baton_kernels.quantize import quantize_rows
from baton_kernels.reference.quantize import QuantizedRows, RowFormat, dequantize_rows_reference
from baton_kernels.reference.scaled_linear import ScaledWeight, dequantize_scaled_reference
from baton_kernels.scaled_linear import FIXED, scaled_linear, scaled_linear_fixed
from baton_kernels.unmeasured_hopper import NUMBERS, hopper_candidates, scaled_numbers

from .closeness import relative_error
from .hopper import compiled_sizes, on_hopper

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = torch.device("cuda", 0)


def gate(sums: torch.Tensor, gated: bool, name: str = "silu") -> torch.Tensor:
    if not gated:
        return sums
    gates, ups = sums.chunk(2, dim=1)
    activation = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}[name]
    return activation(gates) * ups


@on_hopper
@pytest.mark.parametrize("name", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_products_of_numbers(dtype: torch.dtype, name: str | None) -> None:
    cases, gated, name = [], name is not None, name or "silu"
    for rows, outputs, inner in ((1, 100, 200), (20, 600, 1152), (130, 600, 1152), (300, 100, 64), (700, 640, 1000)):
        x = torch.randn(rows, inner, dtype=dtype, device=DEVICE)
        weight = torch.randn(outputs, inner, dtype=dtype, device=DEVICE) / inner**0.5
        bias = torch.randn(outputs, dtype=dtype, device=DEVICE)
        assert fits_hopper(weight)
        configs = hopper_candidates(NUMBERS, rows, Product(outputs, inner, gated), DEVICE)
        out = x.new_empty(rows, outputs // (1 + gated))
        cases += [(x, weight, bias, config, out) for config in configs]
    with compiling_ahead(available_cores()):
        for x, weight, bias, config, out in cases:
            hopper_numbers(x, weight, bias, gated, config, out, gate=name)
    for x, weight, bias, config, out in cases:
        expected = gate(x.double() @ weight.double().T + bias.double(), gated, name)
        for _ in range(2):  # the second time shows whether the first has left its counters at zero
            out.fill_(float("nan"))
            hopper_numbers(x, weight, bias, gated, config, out, gate=name)
            assert relative_error(out, expected) < 2 ** (-7 if dtype == BF16 else -10), (x.shape, config)


def make(kind: str, outputs: int, inner: int) -> tuple[ScaledWeight, RowFormat]:
    dtype = torch.int8 if kind.startswith("int8") else FP8
    codes = (torch.randn(outputs, inner, device=DEVICE) * 40).clamp(-127, 127).to(dtype)
    tile = (128, 128) if kind == "fp8 in tiles" else (1, inner)
    scales = (torch.rand(-(-outputs // tile[0]), -(-inner // tile[1]), device=DEVICE) + 0.1) / 200
    sums = codes.int().sum(dim=1, dtype=torch.int32) if kind == "int8 with zeros" else None
    form = RowFormat(dtype, group=128 if tile[0] > 1 else 0, symmetric=sums is None)
    return ScaledWeight(codes, scales, tile, sums), form


@on_hopper
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "fp8 in tiles", "int8", "int8 with zeros"])
def test_products_with_scales(kind: str, gated: bool) -> None:
    cases: list[tuple[QuantizedRows, ScaledWeight, torch.Tensor, LinearConfig]] = []
    for rows, outputs, inner in ((2, 160, 208), (20, 600, 1152), (130, 600, 1152), (300, 512, 384), (700, 640, 1040)):
        weight, form = make(kind, outputs, inner)
        assert fits_hopper_scaled(weight)
        x = quantize_rows(torch.randn(rows, inner, dtype=BF16, device=DEVICE), form)
        bias = torch.randn(outputs, dtype=BF16, device=DEVICE)
        candidates = hopper_candidates(scaled_numbers(weight), rows, Product(outputs, inner, gated), DEVICE)
        cases += [(x, weight, bias, config) for config in (FIXED._replace(hopper=True), *candidates)]
    with compiling_ahead(available_cores()):
        for x, weight, bias, config in cases:
            scaled_linear(x, weight, bias, BF16, gated, config)
    for x, weight, bias, config in cases:
        wide = dequantize_rows_reference(x).double(), dequantize_scaled_reference(weight, torch.float32).double()
        expected = gate(wide[0] @ wide[1].T + bias.double(), gated)
        for _ in range(2):
            ours = scaled_linear(x, weight, bias, BF16, gated, config)
            assert relative_error(ours, expected) < 2**-7, (x.codes.shape, config)


@on_hopper
@pytest.mark.parametrize("kind", ["fp8", "fp8 in tiles", "int8"])
def test_fixed_products_do_not_depend_on_the_rows_around(kind: str) -> None:
    weight, form = make(kind, 300, 640)
    x = quantize_rows(torch.randn(90, 640, dtype=BF16, device=DEVICE), form)
    some = x._replace(codes=x.codes[66:70].contiguous(), scales=x.scales[66:70].contiguous())
    together = scaled_linear_fixed(x, weight, None, BF16)
    assert torch.equal(scaled_linear_fixed(some, weight, None, BF16), together[66:70])


@pytest.mark.processes
def test_it_compiles_for_each_kind_of_product() -> None:
    sizes = compiled_sizes("numbers")
    assert len(sizes) == 34
    assert min(sizes) > 10_000


def test_other_devices_have_other_kernels() -> None:
    weight = torch.zeros(64, 64, dtype=BF16)
    assert not fits_hopper(weight)
    assert not fits_hopper_scaled(ScaledWeight(weight.to(FP8), torch.ones(64, 1), (1, 64)))
