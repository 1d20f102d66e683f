"""Keys and values in 8 bits: each head has a scale, and a code is the nearest number of float8_e4m3fn to value / scale.

Codes of the largest magnitude stand for all values beyond it. Values that are not finite become NaN, so that the
request in which they arose does not go on with other numbers.
"""

import torch

from .quantize import E4M3_MOST

KV_CODES = torch.float8_e4m3fn


def kv_codes_reference(values: torch.Tensor, inverses: torch.Tensor) -> torch.Tensor:
    """Return the codes of values [T, heads, dim]. inverses: [heads] float32, the reciprocals of the scales."""
    scaled = values.float() * inverses[:, None]
    saturated = scaled.clamp(-E4M3_MOST, E4M3_MOST)
    return torch.where(scaled.isfinite(), saturated, float("nan")).to(KV_CODES)


def kv_numbers_reference(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return codes [T, heads, dim] as numbers of a dtype. scales: [heads] float32."""
    return (codes.float() * scales[:, None]).to(dtype)
