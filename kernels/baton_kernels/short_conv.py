"""Short convolutions over the tokens of each sequence, in one pass over the projections' results.
reference/short_conv.py defines them."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs


@triton.jit
def _inputs_of(projected, token, channel, known, CHANNELS: tl.constexpr):
    """Return the convolution's inputs of a token, rounded as they are in the cache."""
    row = projected + token * (3 * CHANNELS) + channel
    gate = tl.load(row, mask=known, other=0.0)
    x = tl.load(row + 2 * CHANNELS, mask=known, other=0.0)
    return (gate.to(tl.float32) * x.to(tl.float32)).to(gate.dtype)


# One compiled kernel serves all steps: slots are rows of a larger tensor, and only some rows begin at a multiple of 16
# bytes.
@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slots"])
def _short_conv_kernel(
    projected, weight, bias, slots, keys, values, out, slot_stride, key_stride, key_head_stride, value_stride,
    value_head_stride, CHANNELS: tl.constexpr, HALF: tl.constexpr, FILTER: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = channel < CHANNELS
    head, element = channel // (2 * HALF), channel % (2 * HALF)
    is_key = element < HALF
    key_at = keys + head * key_head_stride + element
    value_at = values + head * value_head_stride + element - HALF
    own_weight = tl.load(weight + channel * FILTER + FILTER - 1, mask=known, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    new = _inputs_of(projected, token, channel, known, CHANNELS)
    slot = tl.load(slots + token)
    kept = known & (slot >= 0)
    tl.store(key_at + slot * key_stride, new, mask=kept & is_key)
    tl.store(value_at + slot * value_stride, new, mask=kept & (element >= HALF))
    wide = new.to(tl.float32) * own_weight
    for lag in tl.static_range(1, FILTER):
        before = tl.load(slots + lag * slot_stride + token)
        # Other programs write the inputs of this step's tokens at the same time, so those are computed again.
        row = tl.maximum(token - lag, 0)
        here = (token >= lag) & (before >= 0) & (tl.load(slots + row) == before)
        cached = known & (before >= 0) & (here == 0)
        fresh = _inputs_of(projected, row, channel, known & here, CHANNELS)
        key = tl.load(key_at + before * key_stride, mask=cached & is_key, other=0.0)
        value = tl.load(value_at + before * value_stride, mask=cached & (element >= HALF), other=0.0)
        earlier = fresh.to(tl.float32) + key.to(tl.float32) + value.to(tl.float32)  # two of them are zero
        wide += earlier * tl.load(weight + channel * FILTER + FILTER - 1 - lag, mask=known, other=0.0).to(tl.float32)
    if BIAS:
        wide += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    gate = tl.load(projected + token * (3 * CHANNELS) + CHANNELS + channel, mask=known, other=0.0)
    result = gate.to(tl.float32) * wide.to(gate.dtype).to(tl.float32)
    tl.store(out + token * CHANNELS + channel, result.to(out.dtype.element_ty), mask=known)


def short_conv(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Compute short_conv_reference. projected and weight are contiguous, and so is each row of slots."""
    channels, length = weight.shape
    out = projected.new_empty(len(projected), channels)
    block = min(triton.next_power_of_2(channels), 1024)
    _short_conv_kernel[(len(projected), triton.cdiv(channels, block))](
        projected, weight, weight if bias is None else bias, slots, keys, values, out, slots.stride(0),
        keys.stride(1), keys.stride(2), values.stride(1), values.stride(2), CHANNELS=channels, HALF=keys.shape[3],
        FILTER=length, BLOCK=block, BIAS=bias is not None, num_warps=4, **overlap_options(out.device),
    )  # fmt: skip
    return out
