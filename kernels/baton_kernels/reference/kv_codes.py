"""Keys and values in 8 bits: each head has a scale, and a code is value / scale rounded to float8_e4m3fn.

Values beyond the largest code become that code. Values that are not finite become NaN, so that the request in which
they arose does not continue with other values.
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
    """Return codes [T, heads, dim] as values in a dtype. scales: [heads] float32."""
    return (codes.float() * scales[:, None]).to(dtype)
