"""Where a block of the cache has a recurrent state, and how far a token's step goes, for Triton kernels.
reference/recurrence.py defines both."""

import triton
import triton.language as tl


@triton.jit
def place_in_row(element, group, GROUPS: tl.constexpr, DIM: tl.constexpr):
    """Return where a block has an element of a group's float32 numbers, of which a row has DIM."""
    return (element // DIM * GROUPS + group) * DIM + element % DIM


@triton.jit
def places_of_state(
    key_plane, value_plane, head, values, GROUPS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, PAGE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the plane with a head's state, where a block has the state's elements there, [KEY_BLOCK, values], which
    of these there are, and the numbers of a block. values: elements of a value."""
    PER_GROUP: tl.constexpr = VALUE_HEADS // GROUPS
    FIRST: tl.constexpr = (PER_GROUP + 1) // 2
    group, in_group = head // PER_GROUP, head % PER_GROUP
    key = tl.arange(0, KEY_BLOCK)
    element = key[:, None] * VALUE + values[None, :]
    known = (key < KEY)[:, None] & (values < VALUE)[None, :]
    if in_group < FIRST:
        plane, places = key_plane, place_in_row(in_group * (KEY * VALUE) + element, group, GROUPS, KEY_DIM)
        block_size = PAGE * GROUPS * KEY_DIM
    else:
        place = (in_group - FIRST) * (KEY * VALUE) + element
        plane, places = value_plane, place_in_row(place, group, GROUPS, VALUE_DIM)
        block_size = PAGE * GROUPS * VALUE_DIM
    return plane, places, known, block_size


@triton.jit
def decay_step(rate, bias):
    """Return the length of a step, softplus(rate + bias)."""
    wide = rate.to(tl.float32) + bias
    return tl.where(wide > 20.0, wide, tl.log(1.0 + tl.exp(tl.minimum(wide, 20.0))))
