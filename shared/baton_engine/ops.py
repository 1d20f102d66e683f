"""The fused operations between a model's matrix products, in the form that suits the device."""

from collections.abc import Callable

import msgspec
import torch

from baton_kernels.activation import silu_mul, silu_mul_reference
from baton_kernels.linear import fixed_linear, linear, linear_reference
from baton_kernels.norm import add_rms_norm, add_rms_norm_reference
from baton_kernels.rope import rope_and_cache, rope_and_cache_reference


class Ops(msgspec.Struct, frozen=True):
    """Functions of baton_kernels; their docstrings say what each does."""

    linear: Callable[..., torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    rope_and_cache: Callable[..., torch.Tensor]


TORCH = Ops(linear_reference, add_rms_norm_reference, silu_mul_reference, rope_and_cache_reference)
TRITON = Ops(linear, add_rms_norm, silu_mul, rope_and_cache)
# Rows are independent in all of them, so that a token does not depend on the batch around it.
DETERMINISTIC = Ops(fixed_linear, add_rms_norm, silu_mul, rope_and_cache)


def ops_for(device: torch.device, deterministic: bool = False) -> Ops:
    if device.type != "cuda":
        return TORCH
    return DETERMINISTIC if deterministic else TRITON
