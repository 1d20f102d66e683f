"""Activations in 8 bits, each row by itself, for products with weights in 8 bits."""

from typing import NamedTuple

import torch
from torch.nn import functional

E4M3_MOST = 448.0  # the largest number of float8_e4m3fn
# The scale of a group that has nothing but zeros.
ZERO_SCALE = torch.finfo(torch.float32).eps


class RowFormat(NamedTuple):
    """How rows are rounded to 8 bits.

    dtype: float8_e4m3fn or int8. group: how many columns of a row share a scale, 0 = all. symmetric: zero is 0. most:
    the largest magnitude that a scale is chosen for, 0 = no limit. power_of_two: scales are powers of two. steps: a
    symmetric int8 scale is the largest magnitude divided by this number; codes are rounded and at most 127.
    """

    dtype: torch.dtype
    group: int = 0
    symmetric: bool = True
    most: float = 0.0
    power_of_two: bool = False
    steps: float = 127.5


class QuantizedRows(NamedTuple):
    """Rows [T, K] = (codes - zeros) * scales. codes: [T, K]. scales: [T, ceil(K / group)] float32. zeros: [T] int32, or
    None for 0. group: how many columns share a scale, 0 = all."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group: int = 0


def quantize_rows_reference(
    x: torch.Tensor, form: RowFormat, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None
) -> QuantizedRows:
    """Round rows [T, K] to 8 bits, to the nearest code and ties to even.

    scale, zero: those of all rows, one element each, or one scale for each row; None = computed from the elements of
    each group, like the package compressed-tensors does: int8 codes span 255 steps, and 0 is a code. A group with a
    number that is not finite gets the scale NaN, so that no product with it is finite.
    """
    rows, columns = x.shape
    group = form.group or columns
    values = functional.pad(x.float(), (0, -columns % group)).reshape(rows, -1, group)
    broken = (values * 0).sum(dim=2)
    integers = form.dtype == torch.int8
    zeros = None
    if scale is not None:
        scales = scale.float().reshape(-1, 1).expand(rows, values.shape[1]) + broken
        if not form.symmetric:
            zeros = (scale.new_zeros(1) if zero is None else zero).reshape(1, 1).expand(rows, 1).float()
    elif form.symmetric:
        largest = values.abs().amax(dim=2)
        if form.most:
            largest = largest.clamp(max=form.most)
        # A GPU divides by a Python number by multiplying with its reciprocal, which is not correctly rounded.
        scales = largest / torch.full_like(largest, form.steps if integers else E4M3_MOST)
        scales = scales.where(scales != 0, ZERO_SCALE) + broken
        if form.power_of_two:
            scales = torch.exp2(torch.ceil(torch.log2(scales)))
    else:
        low, high = values.amin(dim=2).clamp(max=0), values.amax(dim=2).clamp(min=0)
        scales = (high - low) / torch.full_like(high, 255)
        scales = scales.where(scales != 0, ZERO_SCALE) + broken
        zeros = torch.round((-128 - low / scales).clamp(-128, 127))
    scaled = values / scales[..., None]
    if zeros is not None:
        scaled = scaled + zeros[..., None]
    scaled = scaled.nan_to_num()
    if integers:
        codes = torch.round(scaled.clamp(-128, 127)).to(torch.int8)
    else:
        codes = scaled.clamp(-E4M3_MOST, E4M3_MOST).to(form.dtype)
    return QuantizedRows(
        codes.reshape(rows, -1)[:, :columns].contiguous(),
        scales.contiguous(),
        None if zeros is None else zeros.nan_to_num().reshape(rows).int(),
        form.group,
    )


def dequantize_rows_reference(rows: QuantizedRows) -> torch.Tensor:
    """Return the dequantized rows, [T, K] float32."""
    columns = rows.codes.shape[1]
    values = rows.codes.float()
    if rows.zeros is not None:
        values -= rows.zeros.float()[:, None]
    return values * rows.scales.repeat_interleave(rows.group or columns, dim=1)[:, :columns]
