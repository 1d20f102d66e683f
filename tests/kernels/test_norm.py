"""RMSNorm with and without the residual addition."""

import pytest
import torch

from .closeness import relative_error


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
