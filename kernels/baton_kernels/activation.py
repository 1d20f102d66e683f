"""The gate of a gated MLP: activation(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.activation import GATES


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """Return silu(gate) * up of float32 values."""
    # Values are rounded where the unfused computation rounds them: after the linear layer and after silu.
    gate = gate.to(dtype).to(tl.float32)
    return (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def gate_of_expert(gate, up, dtype: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return silu(gate) * up of float32 values, or with CLAMPED what clamped_gate_reference returns."""
    if CLAMPED:
        # Without propagate_nan, NaN would become the limit.
        gate = tl.minimum(gate.to(dtype).to(tl.float32), LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up.to(dtype).to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        result = (up + 1) * gate / (1 + tl.exp(-ALPHA * gate))
    else:
        result = silu_mul(gate, up, dtype)
    return result


@triton.jit
def _gate_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, OVERLAP: tl.constexpr):
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    wait_for_inputs(OVERLAP)
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside)
    wide = gate.to(tl.float32)
    # Both activations are x * sigmoid(f(x)). GELU's tanh form is x * (1 + tanh(u)) / 2 = x * sigmoid(2 * u), where
    # 2 * u = 2 * sqrt(2 / pi) * (x + 0.044715 * x^3).
    inner = wide
    if GELU:
        inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    activated = (wide / (1 + tl.exp(-inner))).to(gate.dtype)
    tl.store(out + row * SIZE + columns, activated * up, mask=inside)


def gate_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute gate_mul_reference without storing activation(gate). gate_up must be contiguous."""
    assert activation in GATES, activation
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = min(triton.next_power_of_2(size), 2048)
    _gate_mul_kernel[(rows, triton.cdiv(size, block))](
        gate_up, out, SIZE=size, BLOCK=block, GELU=activation == "gelu_tanh", num_warps=4,
        **overlap_options(out.device),
    )  # fmt: skip
    return out
