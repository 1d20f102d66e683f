"""The gated delta rule and Mamba 2 over paged states. reference/recurrence.py defines them."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .recurrence_tiles import LEAST_TILE, recurrence_tiles
from .reference.recurrence import NORM_EPS, StateInputs, StateShape
from .state_blocks import keep_inputs, place_of, places_of_state, softplus

_MOST_VALUES = 32  # elements of a head's value for which one program has the state


@triton.jit
def _convolved(
    inputs, filters, bias, block, channels, places, group, known, token, start, slot, has_before, input_stride,
    GROUPS: tl.constexpr, DIM: tl.constexpr, KEPT: tl.constexpr, LENGTH: tl.constexpr, RECENT: tl.constexpr,
    FIRST: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return the convolution's results for some channels of a token, rounded as those of the layer are.

    block: of the token before the step's first one of the sequence, `start`. places: of the channels among those of
    the group, of which a row of inputs has KEPT. FIRST: where the rows begin.
    """
    new = tl.load(inputs + token * input_stride + channels, mask=known, other=0.0)
    weight = tl.load(filters + channels * LENGTH + LENGTH - 1, mask=known, other=0.0)
    wide = new.to(tl.float32) * weight.to(tl.float32)
    for lag in tl.static_range(1, LENGTH):
        weight = tl.load(filters + channels * LENGTH + LENGTH - 1 - lag, mask=known, other=0.0).to(tl.float32)
        is_new = token - lag >= start
        row = tl.maximum(token - lag, 0)
        fresh = tl.load(inputs + row * input_stride + channels, mask=known & is_new, other=0.0).to(tl.float32)
        at = FIRST + (slot + (RECENT - 1) * lag) % RECENT * KEPT + places
        cached = tl.load(block + place_of(at, group, GROUPS, DIM), mask=known & (is_new == 0) & has_before, other=0.0)
        wide += (fresh + cached) * weight
    if BIAS:
        wide += tl.load(bias + channels, mask=known, other=0.0).to(tl.float32)
    return (wide * tl.sigmoid(wide)).to(new.dtype).to(tl.float32)


# One compiled kernel serves all steps, as for short convolutions.
@triton.jit(do_not_specialize=["slot_stride", "tokens"], do_not_specialize_on_alignment=["slots"])
def _recurrence_kernel(
    inputs, filters, conv_bias, rates, gates, log_decay, rate_bias, skip, slots, key_plane, value_plane, out, tokens,
    slot_stride, input_stride, rate_stride, gate_stride, GROUPS: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LENGTH: tl.constexpr, RECENT: tl.constexpr,
    PAGE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr,
    MOST: tl.constexpr, LEAST: tl.constexpr, STEPS: tl.constexpr, BY_ELEMENT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """KEY, VALUE: elements of a head. KEY_DIM, VALUE_DIM: float32 numbers of a group in a row of a plane. STEPS:
    steps have lengths. BY_ELEMENT: each element of a key has a rate."""
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    before = tl.load(slots + slot_stride + token)
    if (token > 0) & (before >= 0) & (tl.load(slots + tl.maximum(token - 1, 0)) == before):
        return  # The program of the sequence's first token in this step computes all of them.
    v = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_value = v < VALUE
    out_at = out + head * VALUE + v
    if (slot < 0) & (before < 0):
        tl.store(out_at + token * (VALUE_HEADS * VALUE), tl.zeros([VALUE_BLOCK], out.dtype.element_ty), mask=is_value)
        return
    start = token
    has_before = before >= 0
    PER_GROUP: tl.constexpr = VALUE_HEADS // GROUPS
    FIRST: tl.constexpr = (PER_GROUP + 1) // 2
    GROUP_KEYS: tl.constexpr = KEY_HEADS * KEY // GROUPS
    KEPT: tl.constexpr = 2 * GROUP_KEYS + PER_GROUP * VALUE
    INPUTS: tl.constexpr = (PER_GROUP - FIRST) * KEY * VALUE
    group, in_group = head // PER_GROUP, head % PER_GROUP
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    k = tl.arange(0, KEY_BLOCK)
    is_key = k < KEY
    plane, places, within, block_size = places_of_state(
        key_plane, value_plane, head, v, GROUPS, VALUE_HEADS, KEY, VALUE, PAGE, KEY_DIM, VALUE_DIM, KEY_BLOCK
    )
    key_place = key_head * KEY % GROUP_KEYS + k
    value_place = 2 * GROUP_KEYS + in_group * VALUE + v
    query, key, value = key_head * KEY + k, (KEY_HEADS + key_head) * KEY + k, 2 * KEY_HEADS * KEY + head * VALUE + v
    rate = -tl.exp(tl.load(log_decay + head))
    if BY_ELEMENT:
        rate_at, has_rate = head * KEY + k[:, None], is_key[:, None]
    else:
        rate_at, has_rate = head, True
    if STEPS:
        bias = tl.load(rate_bias + rate_at, mask=has_rate, other=0.0)
    wait_for_inputs(OVERLAP)
    last = tl.maximum(before, 0) // PAGE
    state = tl.load(plane + last * block_size + places, mask=within & has_before, other=0.0)
    block = value_plane + last * (PAGE * GROUPS * VALUE_DIM)
    goes_on = True
    while goes_on:
        q = _convolved(
            inputs, filters, conv_bias, block, query, key_place, group, is_key, token, start, slot, has_before,
            input_stride, GROUPS, VALUE_DIM, KEPT, LENGTH, RECENT, INPUTS, BIAS,
        )  # fmt: skip
        own = _convolved(
            inputs, filters, conv_bias, block, key, GROUP_KEYS + key_place, group, is_key, token, start, slot,
            has_before, input_stride, GROUPS, VALUE_DIM, KEPT, LENGTH, RECENT, INPUTS, BIAS,
        )  # fmt: skip
        new = _convolved(
            inputs, filters, conv_bias, block, value, value_place, group, is_value, token, start, slot, has_before,
            input_stride, GROUPS, VALUE_DIM, KEPT, LENGTH, RECENT, INPUTS, BIAS,
        )  # fmt: skip
        step = 1.0
        if STEPS:
            move = tl.load(rates + token * rate_stride + rate_at, mask=has_rate, other=0.0).to(tl.float32) + bias
            step = softplus(move)
        state = state * tl.exp(LEAST * tl.sigmoid(-rate * move) if LEAST != 0.0 else rate * step)
        if DELTA:
            q = q * (tl.rsqrt(tl.sum(q * q, 0) + EPS) * KEY**-0.5)
            own = own * tl.rsqrt(tl.sum(own * own, 0) + EPS)
            part = MOST * tl.sigmoid(tl.load(gates + token * gate_stride + head).to(tl.float32))
            state += own[:, None] * ((new - tl.sum(state * own[:, None], 0)) * part)[None, :]
        else:
            state += own[:, None] * (new * step)[None, :]
        result = tl.sum(state * q[:, None], 0)
        if SKIP:
            result += tl.load(skip + head) * new
        tl.store(out_at + token * (VALUE_HEADS * VALUE), result.to(out.dtype.element_ty), mask=is_value)
        after = tl.minimum(token + 1, tokens - 1)
        goes_on = (after > token) & (slot >= 0) & (tl.load(slots + slot_stride + after) == slot)
        kept = (slot >= 0) & ((slot % PAGE == PAGE - 1) | (goes_on == 0))
        tl.store(plane + tl.maximum(slot, 0) // PAGE * block_size + places, state, mask=within & kept)
        token = after
        slot = tl.load(slots + after)


def recurrence(
    given: StateInputs,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shape: StateShape,
    single: bool = False,
) -> torch.Tensor:
    """Compute recurrence_reference."""
    planes = [plane.view(torch.float32) for plane in (keys, values)]
    by_token = single or keys.shape[1] < LEAST_TILE or given.least or given.by_element
    out = (_token_by_token if by_token else recurrence_tiles)(given, slots, planes, shape)
    if shape.length > 1:
        keep_inputs(given.inputs, slots, planes[1], shape.keys, shape.first_input, shape.length, shape.recent)
    return out


def recurrence_fixed(
    given: StateInputs,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    shape: StateShape,
    single: bool = False,
) -> torch.Tensor:
    """Compute `recurrence` one token after another, so that the results do not depend on the chunks of a sequence."""
    return recurrence(given, slots, keys, values, shape, single=True)


def _token_by_token(
    given: StateInputs, slots: torch.Tensor, planes: list[torch.Tensor], shape: StateShape
) -> torch.Tensor:
    """Compute `recurrence_tiles`. One program computes all tokens that a sequence has in the step."""
    inputs, filters, bias, rates, gates, log_decay, rate_bias, skip, most, least = given
    tokens, (page, groups) = len(inputs), planes[0].shape[1:3]
    out = inputs.new_empty(tokens, shape.value_heads, shape.value_dim)
    block = min(triton.next_power_of_2(shape.value_dim), _MOST_VALUES)
    _recurrence_kernel[(tokens, shape.value_heads, triton.cdiv(shape.value_dim, block))](
        inputs, filters, _given(bias, filters), _given(rates, inputs), _given(gates, inputs), log_decay,
        _given(rate_bias, log_decay), _given(skip, log_decay), slots, *planes, out, tokens, slots.stride(0),
        inputs.stride(0), _given(rates, inputs).stride(0), _given(gates, inputs).stride(0), GROUPS=groups,
        KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, KEY=shape.key_dim, VALUE=shape.value_dim,
        LENGTH=shape.length, RECENT=shape.recent, PAGE=page, KEY_DIM=planes[0].shape[3], VALUE_DIM=planes[1].shape[3],
        KEY_BLOCK=triton.next_power_of_2(shape.key_dim), VALUE_BLOCK=block, EPS=NORM_EPS, BIAS=bias is not None,
        DELTA=gates is not None, SKIP=skip is not None, MOST=most, LEAST=least, STEPS=rates is not None,
        BY_ELEMENT=given.by_element, num_warps=4, **overlap_options(out.device),
    )  # fmt: skip
    return out


def _given(tensor: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    """Return what a kernel takes for a tensor. It does not read what there is instead."""
    return instead if tensor is None else tensor
