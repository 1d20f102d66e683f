"""RMSNorm, alone, together with the residual addition before it, and with the rounding to 8 bits after it (Zhang and
Sennrich, 2019).

x may be a norm that is not computed yet (PendingNorm). One kernel then computes both norms.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .quantize import fits_a_row, quantize_rows, rounded_rows, store_rounded
from .reference.norm import PendingNorm, sum_of
from .reference.quantize import QuantizedRows, RowFormat

# For up to this many rows, the kernel after a norm computes it; 0 = never. Each program of such a kernel reads the rows
# again.
MOST_NORMED_ROWS = 1


@triton.jit
def normed_row(values, scales, eps, SIZE: tl.constexpr):
    """Return the norm of a row, rounded as add_rms_norm_reference rounds it."""
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    return ((wide * scale).to(scales.dtype) * scales).to(values.dtype)


@triton.jit
def _normed(
    x, residual, total, weight, first, eps, first_eps, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, FIRST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Return the norm of this program's row, after the preceding kernel, and store the sum with the residual in total.

    FIRST: the row is the norm of x with the weight `first`.
    """
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    if FIRST:
        first_scales = tl.load(first + columns, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    values = tl.load(x + tl.program_id(0).to(tl.int64) * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        added = tl.load(residual + row + columns, mask=inside, other=0.0)
    if FIRST:
        values = normed_row(values, first_scales, first_eps, SIZE)
    if ADD:
        values = (values.to(tl.float32) + added).to(values.dtype)
        tl.store(total + row + columns, values, mask=inside)
    return normed_row(values, scales, eps, SIZE)


@triton.jit
def _add_rms_norm_kernel(
    x, residual, total, weight, first, out, eps, first_eps, x_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, FIRST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    normed = _normed(x, residual, total, weight, first, eps, first_eps, x_stride, SIZE, BLOCK, ADD, FIRST, OVERLAP)
    columns = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0).to(tl.int64) * SIZE + columns, normed, mask=columns < SIZE)


@triton.jit
def _quantize_norm_kernel(
    x, residual, total, weight, first, codes, scales, zeros, static_scale, static_zero, columns, groups, row_stride,
    group_stride, most, zero_scale, limit, eps, first_eps, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, FIRST: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, COLUMNS_PER_GROUP: tl.constexpr,
    INTEGERS: tl.constexpr, STATIC: tl.constexpr, SYMMETRIC: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ON_GPU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    normed = _normed(x, residual, total, weight, first, eps, first_eps, x_stride, SIZE, BLOCK, ADD, FIRST, OVERLAP)
    values = normed.to(tl.float32).reshape(GROUPS, GROUP)
    store_rounded(
        values, codes, scales, zeros, static_scale, static_zero, tl.program_id(0).to(tl.int64), columns, groups,
        row_stride, group_stride, most, zero_scale, limit, GROUPS, GROUP, COLUMNS_PER_GROUP, INTEGERS, STATIC,
        SYMMETRIC, POWER_OF_TWO, ON_GPU,
    )  # fmt: skip


def _rows(x: torch.Tensor | PendingNorm) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the rows for _normed, and its arguments for a first norm, whose result is then normed again."""
    if isinstance(x, PendingNorm):
        return x.x, {"first": x.weight, "first_eps": x.eps, "FIRST": True}
    return x, {"first": x, "first_eps": 0.0, "FIRST": False}


def add_rms_norm(
    x: torch.Tensor | PendingNorm,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute add_rms_norm_reference in one pass over x. The rows of x and all of residual must be contiguous.

    total: gets residual + x; None = the residual does.
    """
    x, flags = _rows(x)
    rows, size = x.shape
    out = x.new_empty(rows, size)
    block = triton.next_power_of_2(size)
    added = x if residual is None else residual
    _add_rms_norm_kernel[(rows,)](
        x, added, added if total is None else total, weight, out=out, eps=eps, x_stride=x.stride(0), SIZE=size,
        BLOCK=block, ADD=residual is not None, num_warps=min(max(block // 512, 1), 8), **flags,
        **overlap_options(x.device),
    )  # fmt: skip
    return out


def pending_norm(
    x: torch.Tensor | PendingNorm, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, most: int
) -> tuple[torch.Tensor | PendingNorm, torch.Tensor]:
    """Compute pending_norm_reference. Memory as in add_rms_norm."""
    if isinstance(x, PendingNorm) or len(x) > MOST_NORMED_ROWS or x.shape[1] > most:
        return norm_at_once(x, residual, weight, eps, most)
    # All programs of the next kernel read the residual, so the sum needs separate memory.
    total = x if residual is None else x.new_empty(x.shape)
    return PendingNorm(x, residual, weight, eps, total), total


def norm_at_once(
    x: torch.Tensor | PendingNorm, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute pending_norm_reference without leaving a norm to another kernel. Memory as in add_rms_norm."""
    return add_rms_norm(x, residual, weight, eps), sum_of(x, residual)


def computed(x: torch.Tensor | PendingNorm) -> torch.Tensor:
    """Return rows, with their norm computed if it is pending, for a kernel that does not compute it."""
    return add_rms_norm(*x) if isinstance(x, PendingNorm) else x


def quantize_norm(
    x: torch.Tensor | PendingNorm,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    form: RowFormat,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> QuantizedRows:
    """Compute quantize_norm_reference without storing the norm. Memory as in add_rms_norm."""
    before, flags = _rows(x)
    rows, size = before.shape
    if not fits_a_row(form, size):
        return quantize_rows(add_rms_norm(x, residual, weight, eps), form, scale, zero)
    out, added = rounded_rows(rows, size, form, scale, zero, before.device), before if residual is None else residual
    _quantize_norm_kernel[(rows,)](
        before, added, added, weight, flags.pop("first"), *out.operands, eps, flags.pop("first_eps"), before.stride(0),
        SIZE=size, BLOCK=out.size, ADD=residual is not None, num_warps=min(max(out.size // 512, 1), 8), **flags,
        **out.flags, **overlap_options(before.device),
    )  # fmt: skip
    return out.rows
