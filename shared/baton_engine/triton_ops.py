"""The operations of a step as Triton kernels, for a GPU."""

import msgspec

from baton_kernels.activation import gate_mul
from baton_kernels.blocks import checksum, gather_kv, scatter_kv
from baton_kernels.experts import run_experts, run_experts_fixed
from baton_kernels.linear import fixed_linear, linear
from baton_kernels.norm import add_rms_norm
from baton_kernels.rope import rope_and_cache
from baton_kernels.routing import route, route_fixed

from .ops import Ops

TRITON = Ops(
    linear=linear,
    add_rms_norm=add_rms_norm,
    gate_mul=gate_mul,
    rope_and_cache=rope_and_cache,
    route=route,
    run_experts=run_experts,
    gather_kv=gather_kv,
    scatter_kv=scatter_kv,
    checksum=checksum,
)
# Each row's result depends on that row alone, so a token does not depend on the batch around it.
DETERMINISTIC = msgspec.structs.replace(TRITON, linear=fixed_linear, route=route_fixed, run_experts=run_experts_fixed)
