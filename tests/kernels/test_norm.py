"""RMSNorm with and without the residual addition."""

import pytest
import torch

from baton_kernels.norm import add_rms_norm, quantize_norm
from baton_kernels.quantize import quantize_rows
from baton_kernels.reference.quantize import QuantizedRows, RowFormat, dequantize_rows_reference

from .closeness import relative_error
from .test_quantize import FORMATS, FP8, same


@pytest.mark.parametrize("size", [64, 100, 768, 4096])
@pytest.mark.parametrize("with_residual", [False, True])
def test_matches_float64(device: torch.device, size: int, with_residual: bool) -> None:
    from baton_kernels.norm import add_rms_norm
    from baton_kernels.reference.norm import add_rms_norm_reference

    x, weight = torch.randn(5, size, device=device), torch.randn(size, device=device)
    residual = torch.randn(5, size, device=device) if with_residual else None
    total = x.double() + (residual.double() if residual is not None else 0)
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    for function in (add_rms_norm, add_rms_norm_reference):
        ours = residual.clone() if residual is not None else None
        assert relative_error(function(x.clone(), ours, weight, 1e-5), expected) < 1e-6
        if ours is not None:
            assert relative_error(ours, total) < 1e-6


def test_tiny_values_need_eps(device: torch.device) -> None:
    from baton_kernels.norm import add_rms_norm

    out = add_rms_norm(torch.zeros(2, 64, device=device), None, torch.ones(64, device=device), 1e-6)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_wide_weight_is_applied_before_rounding(device: torch.device) -> None:
    from baton_kernels.norm import add_rms_norm
    from baton_kernels.reference.norm import add_rms_norm_reference

    x = torch.randn(5, 256, device=device, dtype=torch.bfloat16)
    weight = 1 + torch.randn(256, device=device) / 100
    expected = (x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()).bfloat16()
    result = add_rms_norm_reference(x.clone(), None, weight, 1e-5)
    assert result.dtype == torch.bfloat16
    # Where the value is close to the middle of two bfloat16, float32 and float64 may round differently.
    assert (result == expected).float().mean() > 0.99
    # Triton's interpreter cuts off where a GPU rounds.
    torch.testing.assert_close(add_rms_norm(x, None, weight, 1e-5), expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [96, 80])
def test_a_norm_that_is_rounded_at_once_has_the_same_codes(device: torch.device, size: int, name: str) -> None:
    x, weight, form = torch.randn(5, size, device=device), torch.randn(size, device=device), FORMATS[name]
    x[3, 7] = float("nan")
    residual = torch.randn(5, size, device=device)
    for before in (residual, None):
        ours, theirs = (None if before is None else before.clone() for _ in range(2))
        rounded = quantize_norm(x, ours, weight, 1e-5, form)
        assert alike(rounded, quantize_rows(add_rms_norm(x, theirs, weight, 1e-5), form))
        assert ours is None or theirs is None or torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
        exact = x[:3].double() + (0 if before is None else before[:3].double())
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        check_values(exact, rounded, form)
    # A static scale, and groups whose columns are no power of two.
    scale, zero = torch.tensor([0.02], device=device), torch.tensor([3], dtype=torch.int8, device=device)
    for other, *static in ((RowFormat(form.dtype, symmetric=form.symmetric), scale, zero), (RowFormat(FP8, group=24),)):
        rounded = quantize_norm(x, None, weight, 1e-5, other, *static)
        assert alike(rounded, quantize_rows(add_rms_norm(x, None, weight, 1e-5), other, *static))


def alike(ours: QuantizedRows, theirs: QuantizedRows) -> bool:
    if not ours.codes.is_cuda:
        return same(ours, theirs)
    # On a GPU two kernels may add up a row in different orders, so that a scale or a number differs in its last bit.
    equal = (ours.codes.float() == theirs.codes.float()).float().mean()
    return bool(equal > 0.99) and torch.allclose(ours.scales, theirs.scales, rtol=1e-6, equal_nan=True)


def check_values(exact: torch.Tensor, rounded: QuantizedRows, form: RowFormat) -> None:
    """Check that rows of float64 numbers are as near as the format allows, or nearer."""
    if form.most or (form.dtype == torch.int8 and not form.symmetric):
        return
    rows, size = exact.shape
    values = dequantize_rows_reference(rounded)[:rows].double()
    scales = rounded.scales[:rows].repeat_interleave(form.group or size, dim=1)[:, :size]
    step = scales / 2 if form.dtype == torch.int8 else torch.maximum(exact.abs() * 2**-4, scales * 2**-10)
    # The largest number of a row lies half a step outside of int8.
    assert ((values - exact).abs() <= (1 + (form.dtype == torch.int8)) * step * 1.001).all()
