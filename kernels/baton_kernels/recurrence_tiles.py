"""The gated delta rule and Mamba 2 over many tokens of a sequence at once. reference/recurrence.py defines them.

A tile is some consecutive tokens of the step. What a tile's tokens add to each other follows from products of its
queries and keys (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024), for
which nothing but the tile is needed. So the first two kernels compute all tiles side by side, and only the third goes
through the tiles of a sequence one after another, with the state.

Tokens of several sequences may share a tile. A value that is not finite must not reach another sequence's tokens, so
products with another sequence's numbers are replaced by 0 or have a factor that is set to 0 before.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.recurrence import NORM_EPS, StateInputs, StateShape
from .state_blocks import place_of, places_of_state, softplus


class TileSizes(NamedTuple):
    """tile: tokens of a tile, at most. values: elements of a head's value for which one program has the state, at least
    64. The others are warps and stages of kernels."""

    tile: int = 64
    values: int = 64
    tile_warps: int = 4
    state_warps: int = 8
    state_stages: int = 2


_ROWS = 16  # tokens of one program of the convolution
_BEGINS, _SCAN = 16, 1024  # as _state_kernel has them
LEAST_TILE = 16
_SIZES = TileSizes()


# One compiled kernel serves all steps, as for short convolutions.
@triton.jit(do_not_specialize=["slot_stride", "tokens"], do_not_specialize_on_alignment=["slots"])
def _convolution_kernel(
    inputs, filters, bias, slots, plane, mixed, tokens, slot_stride, input_stride, GROUPS: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LENGTH: tl.constexpr,
    RECENT: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr, DELTA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the queries, keys and values of some tokens and one head, normalized as the delta rule needs them.

    FIRST: the place in a group's row where the inputs of earlier tokens begin. DIM: numbers of a group in a row.
    """
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    element = tl.arange(0, BLOCK)
    is_value, is_key = head >= 2 * KEY_HEADS, (head >= KEY_HEADS) & (head < 2 * KEY_HEADS)
    known = element < tl.where(is_value, VALUE, KEY)
    channel = tl.where(is_value, 2 * KEY_HEADS * KEY + (head - 2 * KEY_HEADS) * VALUE, head * KEY) + element
    inside = row < tokens
    wait_for_inputs(OVERLAP)
    wide = tl.zeros([ROWS, BLOCK], tl.float32)
    # How many of the tokens before each one the step has, and the slot of the last one that it does not have.
    fresh = tl.zeros([ROWS], tl.int32)
    before = tl.load(slots + row, mask=inside, other=-1)
    for lag in tl.static_range(LENGTH):
        if lag > 0:
            # The loads do not depend on each other, so that none waits for another.
            previous = tl.load(slots + slot_stride + row - lag + 1, mask=inside & (row >= lag - 1), other=-1)
            earlier = tl.load(slots + row - lag, mask=inside & (row >= lag), other=-2)
            here = fresh == lag - 1
            before = tl.where(here, previous, before)
            fresh += (here & (previous >= 0) & (earlier == previous)).to(tl.int32)
        at = inputs + (row - lag)[:, None] * input_stride + channel[None, :]
        number = tl.load(at, mask=(inside & (row >= lag))[:, None] & known[None, :], other=0.0).to(tl.float32)
        weight = tl.load(filters + channel * LENGTH + LENGTH - 1 - lag, mask=known, other=0.0).to(tl.float32)
        # A number of another sequence may not be finite.
        wide += tl.where((fresh >= lag)[:, None], number, 0.0) * weight[None, :]
    cached = inside & (fresh < LENGTH - 1) & (before >= 0)
    if tl.max(cached.to(tl.int32), 0) > 0:
        GROUP_KEYS: tl.constexpr = KEY_HEADS // GROUPS
        GROUP_VALUES: tl.constexpr = VALUE_HEADS // GROUPS
        key_head, value_head = head % KEY_HEADS, tl.maximum(head - 2 * KEY_HEADS, 0)
        group = tl.where(is_value, value_head // GROUP_VALUES, key_head // GROUP_KEYS)
        place = key_head % GROUP_KEYS * KEY + tl.where(is_key, GROUP_KEYS * KEY, 0)
        place = FIRST + tl.where(is_value, 2 * GROUP_KEYS * KEY + value_head % GROUP_VALUES * VALUE, place) + element
        block = plane + tl.maximum(before, 0) // PAGE * (PAGE * GROUPS * DIM)
        slot = tl.load(slots + row, mask=inside, other=-1)
        for lag in tl.static_range(1, LENGTH):
            kept = (slot + (RECENT - 1) * lag) % RECENT * (2 * GROUP_KEYS * KEY + GROUP_VALUES * VALUE)
            kept_at = block[:, None] + place_of(kept[:, None] + place[None, :], group, GROUPS, DIM)
            number = tl.load(kept_at, mask=(cached & (fresh < lag))[:, None] & known[None, :], other=0.0)
            weight = tl.load(filters + channel * LENGTH + LENGTH - 1 - lag, mask=known, other=0.0).to(tl.float32)
            wide += number * weight[None, :]
    if BIAS:
        wide += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    wide = (wide * tl.sigmoid(wide)).to(mixed.dtype.element_ty)
    if DELTA:
        number = wide.to(tl.float32)
        factor = tl.rsqrt(tl.sum(number * number, 1) + EPS) * tl.where(is_key, 1.0, KEY**-0.5)
        wide = (number * tl.where(is_value, 1.0, factor)[:, None]).to(mixed.dtype.element_ty)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    mixed_at = mixed + row[:, None] * CHANNELS + channel[None, :]
    tl.store(mixed_at, wide, mask=inside[:, None] & known[None, :])


@triton.jit(do_not_specialize=["slot_stride", "tokens"], do_not_specialize_on_alignment=["slots"])
def _tile_kernel(
    mixed, rates, gates, log_decay, rate_bias, slots, sums, rests, reads, known_keys, added, tokens, slot_stride,
    rate_stride, gate_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr,
    DELTA: tl.constexpr, STEPS: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what the third kernel needs of a tile and a value head.

    sums: the logarithm of the decay from before a sequence's first token in the tile to after each token. rests: the
    decay from there to the sequence's last token in the tile. reads: what a token's result has of the addition of each
    token of the tile. known_keys, added: what a token adds for its key is `added` minus the product of `known_keys` and
    the state before the tile.
    """
    let_next_start(OVERLAP)
    tile, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, TILE)
    row = tile.to(tl.int64) * TILE + index
    inside = row < tokens
    rate = -tl.exp(tl.load(log_decay + head))
    before = tl.load(slots + slot_stride + row, mask=inside, other=-1)
    begins = (before < 0) | (tl.load(slots + row - 1, mask=inside & (row > 0), other=-2) != before)
    sequence = tl.cumsum(begins.to(tl.int32), 0)
    same = (sequence[:, None] == sequence[None, :]) & inside[:, None] & inside[None, :]
    seen = same & (index[:, None] >= index[None, :])
    wait_for_inputs(OVERLAP)
    step = tl.where(inside, 1.0, 0.0)
    if STEPS:
        move = tl.load(rates + row * rate_stride + head, mask=inside, other=0.0).to(tl.float32)
        step = softplus(move + tl.load(rate_bias + head))
    part = step
    if DELTA:
        part = MOST * tl.sigmoid(tl.load(gates + row * gate_stride + head, mask=inside, other=0.0).to(tl.float32))
    logs = (rate * step)[None, :]
    total = tl.sum(tl.where(seen, logs, 0.0), 1)
    later = same & (index[:, None] < index[None, :])
    of_head = head.to(tl.int64) * tokens + row
    tl.store(sums + of_head, total, mask=inside)
    tl.store(rests + of_head, tl.exp(tl.sum(tl.where(later, logs, 0.0), 1)), mask=inside)
    decay = tl.exp(total[:, None] - total[None, :])
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    element, v = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    key_at = mixed + row[:, None] * CHANNELS + head // (VALUE_HEADS // KEY_HEADS) * KEY + element[None, :]
    known = inside[:, None] & (element < KEY)[None, :]
    q = tl.load(key_at, mask=known, other=0.0)
    k = tl.load(key_at + KEY_HEADS * KEY, mask=known, other=0.0)
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay, 0.0)
    pair_at = (row[:, None] * VALUE_HEADS + head) * TILE + index[None, :]
    tl.store(reads + pair_at, scores.to(reads.dtype.element_ty), mask=inside[:, None])
    row_of_head = row[:, None] * VALUE_HEADS + head
    value_at = mixed + row[:, None] * CHANNELS + 2 * KEY_HEADS * KEY + head * VALUE + v[None, :]
    known_value = inside[:, None] & (v < VALUE)[None, :]
    if DELTA:
        depends = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * part[:, None]
        # Numbers that are not finite would reach all rows of a product. They count as 0 there, and all tokens that
        # depend on them get `broken`, which is not finite then and else 0.
        broken = tl.sum(k.to(tl.float32) * 0.0, 1) + (part + total) * 0.0
        whole = broken == 0.0
        depends = tl.where(seen & (index[:, None] > index[None, :]) & whole[:, None] & whole[None, :], depends, 0.0)
        inverse = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
        # The inverse of a lower triangle of two by two blocks follows from those of the blocks on the diagonal.
        for level in tl.static_range(LEVELS):
            block_row, block_column = index[:, None] >> level, index[None, :] >> level
            between = tl.where((block_row != block_column) & (block_row >> 1 == block_column >> 1), depends, 0.0)
            if level == 0:
                inverse -= between
            else:
                product = tl.dot(inverse, between, input_precision=PRECISION)
                inverse -= tl.dot(product, inverse, input_precision=PRECISION)
        inverse = inverse.to(mixed.dtype.element_ty)
        known_key = k.to(tl.float32) * (part * tl.exp(total))[:, None]
        known_key = tl.where(whole[:, None], known_key, 0.0).to(mixed.dtype.element_ty)
        known_key = tl.dot(inverse, known_key, input_precision=PRECISION)
        tl.store(known_keys + row_of_head * KEY + element[None, :], known_key.to(mixed.dtype.element_ty), mask=known)
        add = tl.load(value_at, mask=known_value, other=0.0).to(tl.float32) * part[:, None]
        broken += tl.sum(add * 0.0, 1)
        add = tl.where((broken == 0.0)[:, None], add, 0.0).to(mixed.dtype.element_ty)
        broken = tl.sum(tl.where(seen, broken[None, :], 0.0), 1)
        add = tl.dot(inverse, add, input_precision=PRECISION) + broken[:, None]
    else:
        add = tl.load(value_at, mask=known_value, other=0.0).to(tl.float32) * part[:, None]
    tl.store(added + row_of_head * VALUE + v[None, :], add.to(mixed.dtype.element_ty), mask=known_value)


@triton.jit(do_not_specialize=["slot_stride", "tokens"], do_not_specialize_on_alignment=["slots"])
def _state_kernel(
    mixed, sums, rests, reads, known_keys, added, skip, slots, key_plane, value_plane, out, tokens, slot_stride,
    GROUPS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    PAGE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, TILE: tl.constexpr, BEGINS: tl.constexpr, SCAN: tl.constexpr, DELTA: tl.constexpr,
    SKIP: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go through the tiles of the sequences that begin among some tokens. A block has at least the tokens of a tile.

    BEGINS: how many tokens these are. SCAN: tokens among which the end of a sequence is sought at once.
    """
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    head = tl.program_id(1)
    v = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_value = v < VALUE
    token = tl.program_id(0) * BEGINS + tl.arange(0, BEGINS)
    inside = token < tokens
    before = tl.load(slots + slot_stride + token, mask=inside, other=-1)
    begins = inside & ((before < 0) | (tl.load(slots + token - 1, mask=inside & (token > 0), other=-2) != before))
    padding = begins & (before < 0) & (tl.load(slots + token, mask=inside, other=-1) < 0)
    zeros_at = out + (token.to(tl.int64)[:, None] * VALUE_HEADS + head) * VALUE + v[None, :]
    zeros = tl.zeros([BEGINS, VALUE_BLOCK], out.dtype.element_ty)
    tl.store(zeros_at, zeros, mask=padding[:, None] & is_value[None, :])
    begins = begins & (padding == 0)
    plane, places, is_state, block_size = places_of_state(
        key_plane, value_plane, head, v, GROUPS, VALUE_HEADS, KEY, VALUE, PAGE, KEY_DIM, VALUE_DIM, KEY_BLOCK
    )
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    element, index = tl.arange(0, KEY_BLOCK), tl.arange(0, TILE)
    is_key = element < KEY
    key_column = head // (VALUE_HEADS // KEY_HEADS) * KEY + element
    head_sums, head_rests = sums + head.to(tl.int64) * tokens, rests + head.to(tl.int64) * tokens
    start = tl.min(tl.where(begins, token, tokens), 0)
    while start < tokens:
        end = start + 1
        goes_on = True
        while goes_on:
            place = end + tl.arange(0, SCAN)
            slot = tl.load(slots + slot_stride + place, mask=place < tokens, other=-1)
            ends = (slot < 0) | (tl.load(slots + place - 1, mask=place < tokens, other=-2) != slot)
            upto = tl.min(tl.where(ends, place, end + SCAN), 0)
            goes_on = upto == end + SCAN
            end = upto
        last_slot = tl.load(slots + slot_stride + start)
        state_at = plane + tl.maximum(last_slot, 0) // PAGE * block_size + places
        state = tl.load(state_at, mask=is_state & (last_slot >= 0), other=0.0)
        for tile in range(start // TILE, tl.cdiv(end, TILE)):
            here = tile * TILE + index
            own = (here >= start) & (here < end)
            first, last = tl.maximum(start, tile * TILE), tl.minimum(end, tile * TILE + TILE) - 1
            first_slot, final_slot = tl.load(slots + first), tl.load(slots + last)
            decay = tl.exp(tl.load(head_sums + last))
            row = here.to(tl.int64)
            within, within_values = own[:, None] & is_key[None, :], own[:, None] & is_value[None, :]
            key_at = mixed + row[:, None] * CHANNELS + key_column[None, :]
            row_of_head = row[:, None] * VALUE_HEADS + head
            q = tl.load(key_at, mask=within, other=0.0)
            k = tl.load(key_at + KEY_HEADS * KEY, mask=within, other=0.0)
            new = tl.load(added + row_of_head * VALUE + v[None, :], mask=within_values, other=0.0).to(tl.float32)
            pairs = own[:, None] & own[None, :]
            read = tl.load(reads + row_of_head * TILE + index[None, :], mask=pairs, other=0.0)
            total = tl.load(head_sums + row, mask=own, other=0.0)
            rest = tl.load(head_rests + row, mask=own, other=0.0)
            rounded = state.to(mixed.dtype.element_ty)
            if DELTA:
                known_key = tl.load(known_keys + row_of_head * KEY + element[None, :], mask=within, other=0.0)
                new -= tl.dot(known_key, rounded, input_precision=PRECISION)
            result = tl.dot(q, rounded, input_precision=PRECISION) * tl.exp(total)[:, None]
            result += tl.dot(read, new.to(mixed.dtype.element_ty), input_precision=PRECISION)
            if SKIP:
                value_at = mixed + row[:, None] * CHANNELS + 2 * KEY_HEADS * KEY + head * VALUE + v[None, :]
                result += tl.load(skip + head) * tl.load(value_at, mask=within_values, other=0.0).to(tl.float32)
            stop = first + (PAGE - 1 - first_slot % PAGE).to(tl.int32)
            if (first_slot >= 0) & (stop < last):
                # A block ends within the tile. Triton 3.6 loads the keys of the next tile over those above before this
                # branch reads them, so it loads them again.
                own_keys = tl.load(key_at + KEY_HEADS * KEY, mask=within, other=0.0)
                upto_stop = tl.load(head_sums + stop)
                adds = tl.where((here <= stop)[:, None], new * tl.exp(upto_stop - total)[:, None], 0.0)
                between = tl.dot(tl.trans(own_keys), adds.to(mixed.dtype.element_ty), input_precision=PRECISION)
                between += state * tl.exp(upto_stop)
                tl.store(plane + first_slot // PAGE * block_size + places, between, mask=is_state)
            adds = (new * rest[:, None]).to(mixed.dtype.element_ty)
            state = state * decay + tl.dot(tl.trans(k), adds, input_precision=PRECISION)
            if (final_slot >= 0) & ((final_slot % PAGE == PAGE - 1) | (last == end - 1)):
                tl.store(plane + final_slot // PAGE * block_size + places, state, mask=is_state)
            out_at = out + row_of_head * VALUE + v[None, :]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=within_values)
        start = tl.min(tl.where(begins & (token > start), token, tokens), 0)


def recurrence_tiles(
    given: StateInputs,
    slots: torch.Tensor,
    planes: list[torch.Tensor],
    shape: StateShape,
    sizes: TileSizes = _SIZES,
) -> torch.Tensor:
    """Compute recurrence_reference, but leave the inputs of the convolution in the cache as they are.

    given: with rates of heads or none, and decays without bounds. planes: keys and values as float32 numbers, in blocks
    of at least LEAST_TILE tokens.
    """
    inputs, filters, bias, rates, gates, log_decay, rate_bias, skip, most = given[:9]
    tokens, (page, groups) = len(inputs), planes[0].shape[1:3]
    heads, delta = shape.value_heads, gates is not None
    tile = min(sizes.tile, 1 << page.bit_length() - 1)
    out, added = inputs.new_empty(2, tokens, heads, shape.value_dim).unbind()
    mixed = inputs.new_empty(tokens, shape.channels)
    sums, rests = torch.empty(2, heads, tokens, dtype=torch.float32, device=inputs.device)
    reads = inputs.new_empty(tokens, heads, tile)
    known_keys = inputs.new_empty(tokens, heads, shape.key_dim) if delta else reads
    # Triton 3.6 compiles products with fewer than 64 columns to code that reads past the shared memory.
    key_block, value_block = (max(triton.next_power_of_2(dim), 64) for dim in (shape.key_dim, shape.value_dim))
    options = overlap_options(inputs.device)
    precise = "ieee" if inputs.dtype == torch.float32 else "tf32"
    of_heads = {
        "KEY_HEADS": shape.key_heads, "VALUE_HEADS": heads, "KEY": shape.key_dim, "VALUE": shape.value_dim
    }  # fmt: skip
    _convolution_kernel[(triton.cdiv(tokens, _ROWS), 2 * shape.key_heads + heads)](
        inputs, filters, filters if bias is None else bias, slots, planes[1], mixed, tokens, slots.stride(0),
        inputs.stride(0), GROUPS=groups, **of_heads, LENGTH=shape.length, RECENT=shape.recent, PAGE=page,
        DIM=planes[1].shape[3], FIRST=shape.first_input, ROWS=_ROWS, BLOCK=max(key_block, value_block), EPS=NORM_EPS,
        BIAS=bias is not None, DELTA=delta, num_warps=4, **options,
    )  # fmt: skip
    _tile_kernel[(triton.cdiv(tokens, tile), heads)](
        mixed, mixed if rates is None else rates, mixed if gates is None else gates, log_decay,
        log_decay if rate_bias is None else rate_bias, slots, sums, rests, reads, known_keys, added, tokens,
        slots.stride(0), 0 if rates is None else rates.stride(0), 0 if gates is None else gates.stride(0), **of_heads,
        KEY_BLOCK=key_block, VALUE_BLOCK=value_block, TILE=tile, LEVELS=tile.bit_length() - 1, DELTA=delta,
        STEPS=rates is not None, MOST=most, PRECISION=precise, num_warps=sizes.tile_warps, **options,
    )  # fmt: skip
    values = sizes.values
    _state_kernel[(triton.cdiv(tokens, _BEGINS), heads, triton.cdiv(shape.value_dim, values))](
        mixed, sums, rests, reads, known_keys, added, log_decay if skip is None else skip, slots, *planes, out, tokens,
        slots.stride(0), GROUPS=groups, **of_heads, PAGE=page, KEY_DIM=planes[0].shape[3],
        VALUE_DIM=planes[1].shape[3], KEY_BLOCK=key_block, VALUE_BLOCK=values, TILE=tile, BEGINS=_BEGINS, SCAN=_SCAN,
        DELTA=delta, SKIP=skip is not None, PRECISION=precise, num_warps=sizes.state_warps,
        num_stages=sizes.state_stages, **options,
    )  # fmt: skip
    return out
