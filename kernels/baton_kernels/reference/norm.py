"""RMSNorm, alone, together with the residual addition before it, and with the rounding to 8 bits after it (Zhang and
Sennrich, 2019)."""

from typing import NamedTuple

import torch

from .quantize import QuantizedRows, RowFormat, quantize_rows_reference


class PendingNorm(NamedTuple):
    """A norm that is not computed yet. The kernel that uses it computes it, which saves a launch.

    It is the norm of residual + x, as add_rms_norm_reference returns it. x, residual: [T, size] each; the residual is
    only read. total: [T, size], gets residual + x from the kernel that computes the norm; without a residual it is x.
    """

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    eps: float
    total: torch.Tensor


def add_rms_norm_reference(
    x: torch.Tensor | PendingNorm, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """x: [T, size], or its norm, without a residual, that is computed first. residual: [T, size] or None; becomes
    residual + x. weight: [size], of x's dtype or float32.

    Returns norm(residual + x) * weight, or norm(x) * weight without a residual, in x's dtype. The sum is rounded to
    x's dtype before the norm, and the normed value to the weight's dtype before the product, as in transformers.
    """
    if isinstance(x, PendingNorm):
        x = add_rms_norm_reference(x.x, None, x.weight, x.eps)
    if residual is not None:
        x = residual.add_(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
    return (x * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def pending_norm_reference(
    x: torch.Tensor | PendingNorm, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm that add_rms_norm_reference returns, and residual + x.

    On a GPU the norm of few short rows is left to the next kernel: the first result is then a PendingNorm, and
    residual + x is complete once that kernel has run. most: elements of the longest such row. Without a residual, x
    must be a tensor.
    """
    normed = add_rms_norm_reference(x, residual, weight, eps)
    return normed, sum_of(x, residual)


def sum_of(x: torch.Tensor | PendingNorm, residual: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor that holds residual + x after add_rms_norm_reference."""
    if residual is not None:
        return residual
    assert isinstance(x, torch.Tensor), "a norm is only added to a residual"
    return x


def quantize_norm_reference(
    x: torch.Tensor | PendingNorm,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    form: RowFormat,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> QuantizedRows:
    """Return the result of add_rms_norm_reference as quantize_rows_reference rounds it to 8 bits."""
    return quantize_rows_reference(add_rms_norm_reference(x, residual, weight, eps), form, scale, zero)
