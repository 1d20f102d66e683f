"""RMSNorm, alone, together with the residual addition before it, and with the rounding to 8 bits after it (Zhang and
Sennrich, 2019)."""

import torch

from .quantize import QuantizedRows, RowFormat, quantize_rows_reference


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """x: [T, size]. residual: [T, size] or None; becomes residual + x. weight: [size], of x's dtype or float32.

    Returns norm(residual + x) * weight, or norm(x) * weight without a residual, in x's dtype. The sum is rounded to
    x's dtype before the norm, and the normed value to the weight's dtype before the product, as in transformers.
    """
    if residual is not None:
        x = residual.add_(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
    return (x * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def quantize_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    form: RowFormat,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> QuantizedRows:
    """Return the result of add_rms_norm_reference as quantize_rows_reference rounds it to 8 bits."""
    return quantize_rows_reference(add_rms_norm_reference(x, residual, weight, eps), form, scale, zero)
