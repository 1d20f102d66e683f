"""The operations of a step as Triton kernels, for a GPU."""

import msgspec

from baton_kernels.activation import gate_mul, quantize_gate
from baton_kernels.blocks import checksum, gather_kv, scatter_kv
from baton_kernels.compression import compress
from baton_kernels.experts import run_experts, run_experts_fixed
from baton_kernels.grouped_linear import grouped_linear, grouped_linear_fixed
from baton_kernels.head_products import head_product, head_product_fixed
from baton_kernels.index_inputs import index_rope_and_cache
from baton_kernels.index_pools import pool_index_keys
from baton_kernels.latent_inputs import latent_rope_and_cache
from baton_kernels.linear import fixed_linear, linear
from baton_kernels.norm import add_rms_norm, norm_at_once, pending_norm, quantize_norm
from baton_kernels.quantize import quantize_rows
from baton_kernels.quantized_experts import run_quantized_experts, run_quantized_experts_fixed
from baton_kernels.recurrence import recurrence, recurrence_fixed
from baton_kernels.rg_lru import rg_lru
from baton_kernels.rope import rope_and_cache
from baton_kernels.routing import route, route_fixed
from baton_kernels.scaled_linear import scaled_linear, scaled_linear_fixed
from baton_kernels.selective_scan import convolve, selective_scan
from baton_kernels.short_conv import short_conv
from baton_kernels.sinkhorn import sinkhorn
from baton_kernels.turned_ends import keep_key, turn_ends

from .ops import Ops

TRITON = Ops(
    keeps_codes=True,
    linear=linear,
    grouped_linear=grouped_linear,
    scaled_linear=scaled_linear,
    head_product=head_product,
    quantize_rows=quantize_rows,
    add_rms_norm=add_rms_norm,
    pending_norm=pending_norm,
    gate_mul=gate_mul,
    quantize_norm=quantize_norm,
    quantize_gate=quantize_gate,
    rope_and_cache=rope_and_cache,
    latent_rope_and_cache=latent_rope_and_cache,
    index_rope_and_cache=index_rope_and_cache,
    pool_index_keys=pool_index_keys,
    turn_ends=turn_ends,
    keep_key=keep_key,
    compress=compress,
    sinkhorn=sinkhorn,
    short_conv=short_conv,
    recurrence=recurrence,
    convolve=convolve,
    selective_scan=selective_scan,
    rg_lru=rg_lru,
    route=route,
    run_experts=run_experts,
    run_quantized_experts=run_quantized_experts,
    gather_kv=gather_kv,
    scatter_kv=scatter_kv,
    checksum=checksum,
)
# The result of each row depends on that row alone, so a token does not depend on the rest of the batch.
DETERMINISTIC = msgspec.structs.replace(
    TRITON, pending_norm=norm_at_once, linear=fixed_linear, grouped_linear=grouped_linear_fixed,
    scaled_linear=scaled_linear_fixed, head_product=head_product_fixed, recurrence=recurrence_fixed, route=route_fixed,
    run_experts=run_experts_fixed, run_quantized_experts=run_quantized_experts_fixed,
)  # fmt: skip
