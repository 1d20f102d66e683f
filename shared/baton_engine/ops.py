"""The operations of a step that have one implementation per kind of device, with the implementations for a CPU."""

from collections.abc import Callable

import msgspec
import torch

from baton_kernels.reference.activation import gate_mul_reference
from baton_kernels.reference.blocks import checksum_reference, gather_kv_reference, scatter_kv_reference
from baton_kernels.reference.experts import experts_reference
from baton_kernels.reference.linear import linear_reference
from baton_kernels.reference.norm import add_rms_norm_reference
from baton_kernels.reference.rope import rope_and_cache_reference
from baton_kernels.reference.routing import route_reference


class Ops(msgspec.Struct, frozen=True, kw_only=True):
    """Functions of baton_kernels. The docstrings in baton_kernels.reference say what each does."""

    linear: Callable[..., torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], torch.Tensor]
    gate_mul: Callable[[torch.Tensor, str], torch.Tensor]
    rope_and_cache: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    run_experts: Callable[..., torch.Tensor]
    gather_kv: Callable[..., torch.Tensor]
    scatter_kv: Callable[..., torch.Tensor]
    checksum: Callable[[torch.Tensor], torch.Tensor]


TORCH = Ops(
    linear=linear_reference,
    add_rms_norm=add_rms_norm_reference,
    gate_mul=gate_mul_reference,
    rope_and_cache=rope_and_cache_reference,
    route=route_reference,
    run_experts=experts_reference,
    gather_kv=gather_kv_reference,
    scatter_kv=scatter_kv_reference,
    checksum=checksum_reference,
)
