"""The real-gated linear recurrent unit over paged states. reference/rg_lru.py defines it."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.rg_lru import UnitInputs
from .reference.selective_scan import ChannelShape
from .state_blocks import place_of

_CHANNELS = 64  # for which one program has the states


@triton.jit
def _one_minus_exp(x):
    """Return 1 - exp(x) for x of at most 0.

    Where the difference is small, rounding exp(x) would lose most of it. A series keeps it.
    """
    series = -x * (1.0 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(x > -0.125, series, 1.0 - tl.exp(x))


# One compiled kernel serves all steps, as for short convolutions.
@triton.jit(do_not_specialize=["slot_stride", "tokens"], do_not_specialize_on_alignment=["slots"])
def _rg_lru_kernel(
    inputs, input_gates, decay_gates, input_bias, decay_bias, speed, slots, plane, out, tokens, slot_stride,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
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
    known = channel < CHANNELS
    KEPT: tl.constexpr = CHANNELS // GROUPS
    states = plane + place_of(channel % KEPT, channel // KEPT, GROUPS, DIM)
    fastest = -tl.load(speed + channel, mask=known, other=0.0)
    of_input = tl.load(input_bias + channel, mask=known, other=0.0)
    of_decay = tl.load(decay_bias + channel, mask=known, other=0.0)
    wait_for_inputs(OVERLAP)
    has_state = before >= 0
    last = tl.maximum(before, 0) // PAGE * (PAGE * GROUPS * DIM)
    state = tl.load(states + last, mask=known & has_state, other=0.0)
    goes_on = True
    while goes_on:
        at = token * CHANNELS + channel
        x = tl.load(inputs + at, mask=known, other=0.0).to(tl.float32)
        input_gate = tl.load(input_gates + at, mask=known, other=0.0).to(tl.float32) + of_input
        decay_gate = tl.load(decay_gates + at, mask=known, other=0.0).to(tl.float32) + of_decay
        log_decay = fastest * tl.sigmoid(decay_gate)
        factor = tl.where(has_state, tl.sqrt(_one_minus_exp(2.0 * log_decay)), 1.0)
        state = state * tl.exp(log_decay) + factor * (tl.sigmoid(input_gate) * x)
        has_state = True
        tl.store(out + at, state.to(out.dtype.element_ty), mask=known)
        after = tl.minimum(token + 1, tokens - 1)
        goes_on = (after > token) & (slot >= 0) & (tl.load(slots + slot_stride + after) == slot)
        kept = (slot >= 0) & ((slot % PAGE == PAGE - 1) | (goes_on == 0))
        tl.store(states + tl.maximum(slot, 0) // PAGE * (PAGE * GROUPS * DIM), state, mask=known & kept)
        token = after
        slot = tl.load(slots + after)


def rg_lru(given: UnitInputs, slots: torch.Tensor, keys: torch.Tensor, shape: ChannelShape) -> torch.Tensor:
    """Compute rg_lru_reference."""
    plane, tokens = keys.view(torch.float32), len(given.inputs)
    page, groups, dim = plane.shape[1:]
    out = given.inputs.new_empty(tokens, shape.channels)
    _rg_lru_kernel[(tokens, triton.cdiv(shape.channels, _CHANNELS))](
        *given, slots, plane, out, tokens, slots.stride(0), GROUPS=groups, CHANNELS=shape.channels, PAGE=page, DIM=dim,
        BLOCK=_CHANNELS, num_warps=2, **overlap_options(out.device),
    )  # fmt: skip
    return out
