"""Mamba 1 over paged states. reference/selective_scan.py defines it."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.selective_scan import ChannelShape, ScanInputs
from .state_blocks import keep_inputs, place_of, softplus, token_before

_CONVOLVED = 512  # channels of one program of the convolution
_SCANNED = 32  # channels for which one program has the states


# One compiled kernel serves all steps, as for short convolutions.
@triton.jit(do_not_specialize=["slot_stride"], do_not_specialize_on_alignment=["slots"])
def _convolve_kernel(
    inputs, filters, bias, slots, plane, out, slot_stride, input_stride, GROUPS: tl.constexpr, CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """DIM: float32 numbers of a group in a row of the plane."""
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = channel < CHANNELS
    KEPT: tl.constexpr = CHANNELS // GROUPS
    group, place = channel // KEPT, channel % KEPT
    slot = tl.load(slots + token)
    weight = tl.load(filters + channel * LENGTH + LENGTH - 1, mask=known, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    new = tl.load(inputs + token * input_stride + channel, mask=known, other=0.0)
    wide = new.to(tl.float32) * weight
    here = True
    before = slot
    for lag in tl.static_range(1, LENGTH):
        here, before = token_before(slots, slot_stride, token, lag, here, before)
        weight = tl.load(filters + channel * LENGTH + LENGTH - 1 - lag, mask=known, other=0.0).to(tl.float32)
        row = inputs + tl.maximum(token - lag, 0) * input_stride + channel
        fresh = tl.load(row, mask=known & here, other=0.0).to(tl.float32)
        block = plane + tl.maximum(before, 0) // PAGE * (PAGE * GROUPS * DIM)
        at = place_of((slot + (RECENT - 1) * lag) % RECENT * KEPT + place, group, GROUPS, DIM)
        cached = tl.load(block + at, mask=known & (here == 0) & (before >= 0), other=0.0)
        wide += (fresh + cached) * weight
    if BIAS:
        wide += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    if SILU:
        wide *= tl.sigmoid(wide)
    tl.store(out + token * CHANNELS + channel, wide.to(new.dtype), mask=known)


@triton.jit(do_not_specialize=["slot_stride", "tokens"], do_not_specialize_on_alignment=["slots"])
def _scan_kernel(
    inputs, rates, gates, added, read, log_decay, rate_bias, skip, slots, plane, out, tokens, slot_stride, input_stride,
    rate_stride, gate_stride, added_stride, read_stride, GROUPS: tl.constexpr, CHANNELS: tl.constexpr,
    STATE: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STATE_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """DIM: float32 numbers of a group in a row of the plane."""
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    before = tl.load(slots + slot_stride + token)
    if (token > 0) & (before >= 0) & (tl.load(slots + tl.maximum(token - 1, 0)) == before):
        return  # The program of the sequence's first token in this step computes all of them.
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, STATE_BLOCK)
    known, is_state = channel < CHANNELS, n < STATE
    within = known[:, None] & is_state[None, :]
    KEPT: tl.constexpr = CHANNELS // GROUPS
    element = (channel % KEPT)[:, None] * STATE + n[None, :]
    states = plane + place_of(element, (channel // KEPT)[:, None], GROUPS, DIM)
    speed = -tl.exp(tl.load(log_decay + channel[:, None] * STATE + n[None, :], mask=within, other=0.0))
    bias = tl.load(rate_bias + channel, mask=known, other=0.0)
    factor = tl.load(skip + channel, mask=known, other=0.0)
    wait_for_inputs(OVERLAP)
    last = tl.maximum(before, 0) // PAGE * (PAGE * GROUPS * DIM)
    state = tl.load(states + last, mask=within & (before >= 0), other=0.0)
    goes_on = True
    while goes_on:
        x = tl.load(inputs + token * input_stride + channel, mask=known, other=0.0).to(tl.float32)
        rate = tl.load(rates + token * rate_stride + channel, mask=known, other=0.0).to(tl.float32)
        gate = tl.load(gates + token * gate_stride + channel, mask=known, other=0.0).to(tl.float32)
        b = tl.load(added + token * added_stride + n, mask=is_state, other=0.0).to(tl.float32)
        c = tl.load(read + token * read_stride + n, mask=is_state, other=0.0).to(tl.float32)
        step = softplus(rate + bias)
        state = state * tl.exp(speed * step[:, None]) + (step * x)[:, None] * b[None, :]
        result = (tl.sum(state * c[None, :], 1) + factor * x) * gate * tl.sigmoid(gate)
        tl.store(out + token * CHANNELS + channel, result.to(out.dtype.element_ty), mask=known)
        after = tl.minimum(token + 1, tokens - 1)
        goes_on = (after > token) & (slot >= 0) & (tl.load(slots + slot_stride + after) == slot)
        kept = (slot >= 0) & ((slot % PAGE == PAGE - 1) | (goes_on == 0))
        tl.store(states + tl.maximum(slot, 0) // PAGE * (PAGE * GROUPS * DIM), state, mask=within & kept)
        token = after
        slot = tl.load(slots + after)


def convolve(
    inputs: torch.Tensor, filters: torch.Tensor, bias: torch.Tensor | None, slots: torch.Tensor, values: torch.Tensor,
    shape: ChannelShape, silu: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Compute convolve_reference."""
    plane = values.view(torch.float32)
    page, groups, dim = plane.shape[1:]
    out = inputs.new_empty(len(inputs), shape.channels)
    _convolve_kernel[(len(inputs), triton.cdiv(shape.channels, _CONVOLVED))](
        inputs, filters, filters if bias is None else bias, slots, plane, out, slots.stride(0), inputs.stride(0),
        GROUPS=groups, CHANNELS=shape.channels, LENGTH=shape.length, RECENT=shape.recent, PAGE=page, DIM=dim,
        BLOCK=_CONVOLVED, BIAS=bias is not None, SILU=silu, num_warps=4, **overlap_options(out.device),
    )  # fmt: skip
    keep_inputs(inputs, slots, plane, 0, 0, shape.length, shape.recent)
    return out


def selective_scan(given: ScanInputs, slots: torch.Tensor, keys: torch.Tensor, shape: ChannelShape) -> torch.Tensor:
    """Compute selective_scan_reference."""
    plane, tokens = keys.view(torch.float32), len(given.inputs)
    page, groups, dim = plane.shape[1:]
    out = given.inputs.new_empty(tokens, shape.channels)
    rows = (given.inputs, given.rates, given.gates, given.added, given.read)
    _scan_kernel[(tokens, triton.cdiv(shape.channels, _SCANNED))](
        *given, slots, plane, out, tokens, slots.stride(0), *(each.stride(0) for each in rows), GROUPS=groups,
        CHANNELS=shape.channels, STATE=shape.state, PAGE=page, DIM=dim, BLOCK=_SCANNED,
        STATE_BLOCK=triton.next_power_of_2(shape.state), num_warps=2, **overlap_options(out.device),
    )  # fmt: skip
    return out
