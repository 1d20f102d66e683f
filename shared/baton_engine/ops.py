"""The operations of a step that have one implementation per kind of device, with the implementations for a CPU."""

from collections.abc import Callable

import msgspec
import torch

from baton_kernels.reference.activation import gate_mul_reference, quantize_gate_reference
from baton_kernels.reference.blocks import checksum_reference, gather_kv_reference, scatter_kv_reference
from baton_kernels.reference.compression import compress_reference, keep_key_reference, turn_ends_reference
from baton_kernels.reference.experts import experts_reference
from baton_kernels.reference.grouped_linear import grouped_linear_reference
from baton_kernels.reference.head_product import head_product_reference
from baton_kernels.reference.index_pools import pool_index_keys_reference
from baton_kernels.reference.indexed import index_rope_and_cache_reference
from baton_kernels.reference.latent import latent_rope_and_cache_reference
from baton_kernels.reference.linear import linear_reference
from baton_kernels.reference.norm import (
    PendingNorm,
    add_rms_norm_reference,
    pending_norm_reference,
    quantize_norm_reference,
)
from baton_kernels.reference.quantize import QuantizedRows, quantize_rows_reference
from baton_kernels.reference.quantized_experts import quantized_experts_reference
from baton_kernels.reference.recurrence import recurrence_reference
from baton_kernels.reference.rg_lru import rg_lru_reference
from baton_kernels.reference.rope import rope_and_cache_reference
from baton_kernels.reference.routing import route_reference
from baton_kernels.reference.scaled_linear import scaled_linear_reference
from baton_kernels.reference.selective_scan import convolve_reference, selective_scan_reference
from baton_kernels.reference.short_conv import short_conv_reference
from baton_kernels.reference.sinkhorn import sinkhorn_reference


class Ops(msgspec.Struct, frozen=True, kw_only=True):
    """Functions of baton_kernels. The docstrings in baton_kernels.reference say what each does.

    keeps_codes: products read the codes of quantized weights. Otherwise such weights are turned into numbers once, when
    they are loaded: a CPU would take longer to do so in each step than to read the numbers.
    """

    keeps_codes: bool
    linear: Callable[..., torch.Tensor]
    grouped_linear: Callable[..., torch.Tensor]
    scaled_linear: Callable[..., torch.Tensor]
    head_product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    quantize_rows: Callable[..., QuantizedRows]
    add_rms_norm: Callable[[torch.Tensor | PendingNorm, torch.Tensor | None, torch.Tensor, float], torch.Tensor]
    pending_norm: Callable[..., tuple[torch.Tensor | PendingNorm, torch.Tensor]]
    gate_mul: Callable[[torch.Tensor, str], torch.Tensor]
    quantize_norm: Callable[..., QuantizedRows]
    quantize_gate: Callable[..., QuantizedRows]
    rope_and_cache: Callable[..., torch.Tensor]
    latent_rope_and_cache: Callable[..., torch.Tensor]
    index_rope_and_cache: Callable[..., torch.Tensor]
    pool_index_keys: Callable[..., None]
    turn_ends: Callable[..., torch.Tensor]
    keep_key: Callable[..., None]
    compress: Callable[..., None]
    sinkhorn: Callable[[torch.Tensor, int, float], torch.Tensor]
    short_conv: Callable[..., torch.Tensor]
    recurrence: Callable[..., torch.Tensor]
    convolve: Callable[..., torch.Tensor]
    selective_scan: Callable[..., torch.Tensor]
    rg_lru: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    run_experts: Callable[..., torch.Tensor]
    run_quantized_experts: Callable[..., torch.Tensor]
    gather_kv: Callable[..., torch.Tensor]
    scatter_kv: Callable[..., torch.Tensor]
    checksum: Callable[[torch.Tensor], torch.Tensor]


TORCH = Ops(
    keeps_codes=False,
    linear=linear_reference,
    grouped_linear=grouped_linear_reference,
    scaled_linear=scaled_linear_reference,
    head_product=head_product_reference,
    quantize_rows=quantize_rows_reference,
    add_rms_norm=add_rms_norm_reference,
    pending_norm=pending_norm_reference,
    gate_mul=gate_mul_reference,
    quantize_norm=quantize_norm_reference,
    quantize_gate=quantize_gate_reference,
    rope_and_cache=rope_and_cache_reference,
    latent_rope_and_cache=latent_rope_and_cache_reference,
    index_rope_and_cache=index_rope_and_cache_reference,
    pool_index_keys=pool_index_keys_reference,
    turn_ends=turn_ends_reference,
    keep_key=keep_key_reference,
    compress=compress_reference,
    sinkhorn=sinkhorn_reference,
    short_conv=short_conv_reference,
    recurrence=recurrence_reference,
    convolve=convolve_reference,
    selective_scan=selective_scan_reference,
    rg_lru=rg_lru_reference,
    route=route_reference,
    run_experts=experts_reference,
    run_quantized_experts=quantized_experts_reference,
    gather_kv=gather_kv_reference,
    scatter_kv=scatter_kv_reference,
    checksum=checksum_reference,
)
