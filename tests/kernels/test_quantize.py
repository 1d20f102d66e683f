"""Activations in 8 bits: the kernel gives the codes and scales of the reference, which keeps its distance."""

import pytest
import torch

from baton_kernels.quantize import quantize_rows
from baton_kernels.reference.quantize import (
    QuantizedRows,
    RowFormat,
    dequantize_rows_reference,
    quantize_rows_reference,
)

FP8, INT8 = torch.float8_e4m3fn, torch.int8
FORMATS = {
    "fp8": RowFormat(FP8),
    "fp8 in groups": RowFormat(FP8, group=32),
    "fp8 in groups, powers of two": RowFormat(FP8, group=32, power_of_two=True),
    "fp8 with a bound": RowFormat(FP8, most=1.5),
    "int8": RowFormat(INT8),
    "int8 of 127 steps": RowFormat(INT8, steps=127.0),
    "int8 with a zero": RowFormat(INT8, symmetric=False),
}


def same(ours: QuantizedRows, expected: QuantizedRows) -> bool:
    zeros = expected.zeros is None if ours.zeros is None else torch.equal(ours.zeros, expected.zeros)
    return (
        torch.equal(ours.codes.float(), expected.codes.float())
        and torch.equal(ours.scales.nan_to_num(-1), expected.scales.nan_to_num(-1))
        and zeros
    )


def rows(device: torch.device, columns: int = 96) -> torch.Tensor:
    """Return rows of very different sizes, one of zeros, and a large number among tiny ones."""
    x = torch.randn(6, columns, device=device) * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 0.0, 1e-3], device=device)[:, None]
    x[5, 7] = 40.0
    return x


@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales_are_those_of_the_reference(name: str, device: torch.device) -> None:
    x = rows(device)
    assert same(quantize_rows(x, FORMATS[name]), quantize_rows_reference(x, FORMATS[name]))
    cut_off = x[:, :80].contiguous()
    assert same(quantize_rows(cut_off, FORMATS[name]), quantize_rows_reference(cut_off, FORMATS[name]))


@pytest.mark.parametrize("form", [RowFormat(FP8), RowFormat(INT8), RowFormat(INT8, symmetric=False)], ids=str)
def test_a_static_scale_is_that_of_all_rows(form: RowFormat, device: torch.device) -> None:
    x, scale = rows(device), torch.tensor([0.02], device=device)
    zero = None if form.symmetric else torch.tensor([-7], dtype=torch.int8, device=device)
    ours = quantize_rows(x, form, scale, zero)
    assert same(ours, quantize_rows_reference(x, form, scale, zero))
    assert torch.equal(ours.scales, scale.expand(6, 1))


@pytest.mark.parametrize("name", ["fp8", "fp8 in groups", "int8", "int8 with a zero"])
def test_values_are_as_near_as_the_format_allows(name: str, device: torch.device) -> None:
    x, form = rows(device), FORMATS[name]
    quantized = quantize_rows_reference(x, form)
    error = (dequantize_rows_reference(quantized) - x).abs()
    scales = quantized.scales.repeat_interleave(x.shape[1] // quantized.scales.shape[1], dim=1)
    if form.dtype == INT8:
        # Half a step; with a zero that is rounded, too, a whole one. The largest number lies half a step outside.
        assert (error <= scales * 1.001).all()
    else:
        # Three bits of the mantissa: half of the last one, or half of the least number.
        assert (error <= torch.maximum(x.abs() * 2**-4, scales * 2**-10) * 1.001).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["fp8", "int8", "int8 with a zero"])
def test_a_number_that_is_not_finite_breaks_its_own_row_alone(name: str, bad: float, device: torch.device) -> None:
    x = rows(device)
    x[2, 5] = bad
    for ours in (quantize_rows(x, FORMATS[name]), quantize_rows_reference(x, FORMATS[name])):
        assert ours.scales.isnan().flatten().tolist() == [False, False, True, False, False, False]
