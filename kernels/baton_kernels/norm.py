"""RMSNorm, alone and together with the residual addition before it (Zhang and Sennrich, 2019)."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs


@triton.jit
def _add_rms_norm_kernel(
    x, residual, weight, out, eps, x_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    scales = tl.load(weight + columns, mask=inside)
    wait_for_inputs(OVERLAP)
    values = tl.load(x + tl.program_id(0).to(tl.int64) * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        values = (values.to(tl.float32) + tl.load(residual + row + columns, mask=inside, other=0.0)).to(values.dtype)
        tl.store(residual + row + columns, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    normed = ((wide * scale).to(scales.dtype) * scales).to(values.dtype)
    tl.store(out + row + columns, normed, mask=inside)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute add_rms_norm_reference in one pass over x. The rows of x and all of residual must be contiguous."""
    rows, size = x.shape
    out = x.new_empty(rows, size)
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        x.stride(0),
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(max(block // 512, 1), 8),
        **overlap_options(x.device),
    )
    return out
