"""The gate of a gated MLP: activation(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from typing import Any

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .quantize import fits_a_row, quantize_rows, rounded_rows, store_rounded
from .reference.activation import ACTIVATIONS, ClampedGate, ExpertGate, LimitedGate, NoGate, is_gated
from .reference.quantize import QuantizedRows, RowFormat


@triton.jit
def _silu_or_gelu(gate, dtype: tl.constexpr, GELU: tl.constexpr):
    """Return silu(gate), or with GELU gelu_tanh(gate), as float32 values."""
    # Values are rounded where the unfused computation rounds them: after the linear layer and after the activation.
    gate = gate.to(dtype).to(tl.float32)
    # Both activations are x * sigmoid(f(x)). GELU's tanh form is x * (1 + tanh(u)) / 2 = x * sigmoid(2 * u), where
    # 2 * u = 2 * sqrt(2 / pi) * (x + 0.044715 * x^3).
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1 + tl.exp(-inner))).to(dtype).to(tl.float32)


@triton.jit
def activated(gate, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return activation(gate) as float32 values. ACTIVATION: a key of ACTIVATIONS."""
    if ACTIVATION == "silu" or ACTIVATION == "gelu_tanh":
        result = _silu_or_gelu(gate, dtype, ACTIVATION == "gelu_tanh")
    else:
        gate = gate.to(dtype).to(tl.float32)
        if ACTIVATION == "gelu":
            result = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
        elif ACTIVATION == "quick_gelu":
            result = gate / (1 + tl.exp(-1.702 * gate))
        else:
            tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
            # Without propagate_nan, a NaN would become 0.
            result = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
            if ACTIVATION == "relu2":
                result = result * result
        result = result.to(dtype).to(tl.float32)
    return result


@triton.jit
def gated_by(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up as float32 values. ACTIVATION: a key of ACTIVATIONS."""
    return activated(gate, dtype, ACTIVATION) * up.to(dtype).to(tl.float32)


@triton.jit
def gated(gate, up, dtype: tl.constexpr, GELU: tl.constexpr):
    """Return silu(gate) * up, or with GELU gelu_tanh(gate) * up, as float32 values."""
    return _silu_or_gelu(gate, dtype, GELU) * up.to(dtype).to(tl.float32)


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up of float32 values."""
    return gated(gate, up, dtype, False)


@triton.jit
def gate_of_expert(gate, up, dtype: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Compute expert_gate_reference for float32 values. GATE, ALPHA, LIMIT: as gate_options returns them."""
    if GATE == "clamped":
        # Without propagate_nan, a NaN would become the limit.
        gate = tl.minimum(gate.to(dtype).to(tl.float32), LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up.to(dtype).to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        result = (up + 1) * gate / (1 + tl.exp(-ALPHA * gate))
    elif GATE == "limited" or GATE == "limited_before":
        if GATE == "limited_before":
            gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        gate = tl.minimum(_silu_or_gelu(gate, dtype, False), LIMIT, propagate_nan=tl.PropagateNan.ALL)
        result = gate * tl.clamp(up.to(dtype).to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    else:
        result = gated_by(gate, up, dtype, GATE)
    return result


@triton.jit
def unit_of_expert(
    acc, acc_up, dtype: tl.constexpr, GATED: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Return what a product of experts stores, as float32 values. acc: its sums; with GATED those of gates, while
    acc_up are those of ups. The other arguments are those that gate_options returns."""
    if GATED:
        acc = gate_of_expert(acc, acc_up, dtype, GATE, ALPHA, LIMIT)
    elif GATE != "none":
        acc = activated(acc, dtype, GATE)
    return acc


def gate_options(gate: ExpertGate | None) -> dict[str, Any]:
    """Return the kernel arguments that describe the gate of experts. None = the product has no activation."""
    name, alpha, limit = gate, 1.0, 0.0
    if isinstance(gate, ClampedGate):
        name, alpha, limit = "clamped", gate.alpha, gate.limit
    elif isinstance(gate, LimitedGate):
        name, limit = "limited_before" if gate.before else "limited", gate.limit
    elif isinstance(gate, NoGate):
        name = gate.activation
    assert name in {*ACTIVATIONS, "clamped", "limited", "limited_before", None}, gate
    return {"GATED": is_gated(gate), "GATE": name or "none", "ALPHA": alpha, "LIMIT": limit}


@triton.jit
def _gate_mul_kernel(
    gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr
):
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    wait_for_inputs(OVERLAP)
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside)
    tl.store(out + row * SIZE + columns, gated_by(gate, up, gate.dtype, ACTIVATION).to(gate.dtype), mask=inside)


@triton.jit
def _quantize_gate_kernel(
    gate_up, codes, scales, zeros, static_scale, static_zero, columns, groups, row_stride, group_stride, most,
    zero_scale, limit, ACTIVATION: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS_PER_GROUP: tl.constexpr, INTEGERS: tl.constexpr, STATIC: tl.constexpr, SYMMETRIC: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, ON_GPU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * COLUMNS_PER_GROUP + tl.arange(0, GROUP)[None, :]
    known = column < columns
    wait_for_inputs(OVERLAP)
    gate = tl.load(gate_up + row * 2 * columns + column, mask=known, other=0.0)
    up = tl.load(gate_up + row * 2 * columns + columns + column, mask=known, other=0.0)
    values = gated_by(gate, up, gate.dtype, ACTIVATION).to(gate.dtype).to(tl.float32)
    store_rounded(
        values, codes, scales, zeros, static_scale, static_zero, row, columns, groups, row_stride, group_stride, most,
        zero_scale, limit, GROUPS, GROUP, COLUMNS_PER_GROUP, INTEGERS, STATIC, SYMMETRIC, POWER_OF_TWO, ON_GPU,
    )  # fmt: skip


def gate_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute gate_mul_reference without storing activation(gate). gate_up must be contiguous."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = min(triton.next_power_of_2(size), 2048)
    _gate_mul_kernel[(rows, triton.cdiv(size, block))](
        gate_up, out, SIZE=size, BLOCK=block, ACTIVATION=activation, num_warps=4,
        **overlap_options(out.device),
    )  # fmt: skip
    return out


def quantize_gate(
    gate_up: torch.Tensor,
    activation: str,
    form: RowFormat,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> QuantizedRows:
    """Compute quantize_gate_reference without storing the gated values. gate_up must be contiguous."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if not fits_a_row(form, size):
        return quantize_rows(gate_mul(gate_up, activation), form, scale, zero)
    out = rounded_rows(rows, size, form, scale, zero, gate_up.device)
    _quantize_gate_kernel[(rows,)](
        gate_up, *out.operands, ACTIVATION=activation, num_warps=min(max(out.size // 1024, 4), 16),
        **out.flags, **overlap_options(gate_up.device),
    )  # fmt: skip
    return out.rows
