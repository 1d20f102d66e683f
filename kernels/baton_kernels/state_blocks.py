"""Blocks of the paged cache with recurrent states. reference/state_blocks.py describes what they hold."""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs

_CHANNELS = 512  # of one program that writes inputs


@triton.jit
def place_of(element, head, GROUPS: tl.constexpr, DIM: tl.constexpr):
    """Return where a block has an element of a group's float32 numbers. DIM: those of a group in a row of the plane."""
    return (element // DIM * GROUPS + head) * DIM + element % DIM


@triton.jit
def places_of_state(
    key_plane, value_plane, head, values, GROUPS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, PAGE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the plane with a head's state, where a block has the state's elements there, [KEY_BLOCK, values], which
    of these there are, and the numbers of a block.

    values: elements of a value. KEY, VALUE: elements of a head. KEY_DIM, VALUE_DIM: as DIM in place_of.
    """
    PER_GROUP: tl.constexpr = VALUE_HEADS // GROUPS
    FIRST: tl.constexpr = (PER_GROUP + 1) // 2
    group, in_group = head // PER_GROUP, head % PER_GROUP
    key = tl.arange(0, KEY_BLOCK)
    element = key[:, None] * VALUE + values[None, :]
    known = (key < KEY)[:, None] & (values < VALUE)[None, :]
    if in_group < FIRST:
        plane, places = key_plane, place_of(in_group * (KEY * VALUE) + element, group, GROUPS, KEY_DIM)
        block_size = PAGE * GROUPS * KEY_DIM
    else:
        place = (in_group - FIRST) * (KEY * VALUE) + element
        plane, places = value_plane, place_of(place, group, GROUPS, VALUE_DIM)
        block_size = PAGE * GROUPS * VALUE_DIM
    return plane, places, known, block_size


@triton.jit
def token_before(slots, slot_stride, token, lag: tl.constexpr, here, before):
    """Return whether the step has the token that is `lag` before this one, and the slot of the last token that it does
    not have; -1 = there is none.

    here, before: what this returned for the preceding lag; for the first one, true and any slot.
    """
    previous = tl.load(slots + slot_stride + tl.maximum(token - lag + 1, 0))
    before = tl.where(here, previous, before)
    is_here = here & (token >= lag) & (previous >= 0) & (tl.load(slots + tl.maximum(token - lag, 0)) == previous)
    return is_here, before


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)).

    Rounding 1 + exp(x) loses most of a small exp(x), and steps are often that small. The factor makes up for this.
    """
    small = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + small
    lost = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    return tl.where(x > 20.0, x, tl.where(rounded == 1.0, small, tl.log(rounded) * (small / lost)))


# One compiled kernel serves all steps, as for short convolutions.
@triton.jit(do_not_specialize=["slot_stride", "tokens"], do_not_specialize_on_alignment=["slots"])
def _keep_inputs_kernel(
    inputs, slots, plane, tokens, slot_stride, input_stride, GROUPS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, FIRST: tl.constexpr, LENGTH: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    after = tl.minimum(token + 1, tokens - 1)
    goes_on = (after > token) & (tl.load(slots + slot_stride + after) == slot)
    wait_for_inputs(OVERLAP)
    if (slot < 0) | (goes_on & (slot % PAGE != PAGE - 1)):
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = channel < 2 * KEYS + VALUES
    GROUP_KEYS: tl.constexpr = KEYS // GROUPS
    GROUP_VALUES: tl.constexpr = VALUES // GROUPS
    if KEYS:
        is_value = channel >= 2 * KEYS
        at_key, at_value = channel % KEYS, channel - 2 * KEYS
        group = tl.where(is_value, at_value // GROUP_VALUES, at_key // GROUP_KEYS)
        place = at_key % GROUP_KEYS + tl.where(channel >= KEYS, GROUP_KEYS, 0)
        place = FIRST + tl.where(is_value, 2 * GROUP_KEYS + at_value % GROUP_VALUES, place)
    else:
        group, place = channel // GROUP_VALUES, FIRST + channel % GROUP_VALUES
    here = True
    before = slot
    for lag in tl.static_range(LENGTH - 1):
        row = tl.maximum(token - lag, 0)
        if lag > 0:
            here, before = token_before(slots, slot_stride, token, lag, here, before)
        at = (slot + (RECENT - 1) * lag) % RECENT * (2 * GROUP_KEYS + GROUP_VALUES) + place
        at = place_of(at, group, GROUPS, DIM)
        new = tl.load(inputs + row * input_stride + channel, mask=known & here, other=0.0).to(tl.float32)
        cached = known & (here == 0) & (before >= 0)
        new += tl.load(plane + tl.maximum(before, 0) // PAGE * (PAGE * GROUPS * DIM) + at, mask=cached, other=0.0)
        tl.store(plane + slot // PAGE * (PAGE * GROUPS * DIM) + at, new, mask=known)


def keep_inputs(
    inputs: torch.Tensor, slots: torch.Tensor, plane: torch.Tensor, keys: int, first: int, length: int, recent: int
) -> None:
    """Write the last inputs of a convolution into blocks, after all programs have read those of earlier steps.

    A block gets them with its last token that is computed in this step, also those of tokens in the block before it.

    inputs: [T, channels], each row contiguous. slots: as in recurrence_reference. plane: [blocks, block_size, groups,
    numbers] float32. keys: how many of the channels are queries and as many keys, which come first; each group has its
    part of both and of the values. first: where the inputs of a group begin among its numbers. length, recent: as in
    StateShape.
    """
    (tokens, channels), (page, groups, dim) = inputs.shape, plane.shape[1:]
    _keep_inputs_kernel[(tokens, triton.cdiv(channels, _CHANNELS))](
        inputs, slots, plane, tokens, slots.stride(0), inputs.stride(0), GROUPS=groups, KEYS=keys,
        VALUES=channels - 2 * keys, FIRST=first, LENGTH=length, RECENT=recent, PAGE=page, DIM=dim, BLOCK=_CHANNELS,
        num_warps=4, **overlap_options(inputs.device),
    )  # fmt: skip
