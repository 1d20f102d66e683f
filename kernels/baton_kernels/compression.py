"""Entries of compressed attention, as windows of tokens end. reference/compression.py defines them.

A window that begins in a step does not depend on earlier steps. One program computes its entry from all of its tokens,
and likewise the state after a token at the end of a block. The tokens whose windows began in earlier steps need the
state that a block of the cache has. One program computes all of these of a sequence, because it also overwrites that
state.
"""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs
from .reference.compression import Compression, window_rows


@triton.jit
def _added(peak, total, acc, gate, vector):
    """Return a running softmax with one more token."""
    top = tl.maximum(peak, gate)
    # Before a gate above -inf, both differences would be NaN.
    shrink = tl.where(peak == float("-inf"), 0.0, tl.exp(peak - top))
    weight = tl.exp(gate - top)
    return top, total * shrink + weight, acc * shrink + weight * vector


# One compiled kernel serves all steps, as for short convolutions.
@triton.jit(
    do_not_specialize=["slot_stride", "tokens", "row_stride", "first", "back", "column"],
    do_not_specialize_on_alignment=["positions", "slots", "entry_slots"],
)
def _compress_kernel(
    projected, bias, norm, cos, sin, positions, slots, entry_slots, states, entries, scratch, eps, tokens, slot_stride,
    row_stride, first, back, column,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, RATE: tl.constexpr, OVERLAPS: tl.constexpr, PAIRS: tl.constexpr,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_NUMBERS: tl.constexpr, LANES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """scratch: [T, DIM] float32. BLOCK_NUMBERS: float32 numbers of a block with states. LANES: at least the tokens of
    all windows that a state depends on."""
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAP)
    place = tl.load(positions + token) % RATE
    # Tokens before this one on which its state depends.
    need = place + (RATE if OVERLAPS else 0)
    back_to = token - tl.arange(0, LANES)
    known = (back_to > 0) & (back_to > token - need)
    before = tl.load(slots + slot_stride + back_to, mask=known, other=-1)
    breaks = known & ((before < 0) | (tl.load(slots + back_to - 1, mask=known, other=-2) != before))
    # The token from which on the step has all tokens of the sequence.
    begin = tl.max(tl.where(breaks, back_to, tl.maximum(token - need, 0)), axis=0)
    alone = begin <= token - need
    before = tl.load(slots + slot_stride + token)
    slot = tl.load(slots + token)
    last = tokens - 1
    if alone:
        after = tl.minimum(token + 1, last)
        goes_on = (after > token) & (tl.load(slots + slot_stride + after) == slot)
        keeps = (slot >= 0) & ((slot % PAGE == PAGE - 1) | (goes_on == 0))
        closes = (place == RATE - 1) & (tl.load(entry_slots + token) >= 0)
        if (keeps | closes) == 0:
            return
    elif begin < token:
        return  # The program of the sequence's first token in this step computes this one.

    lane = tl.arange(0, BLOCK_DIM)
    inside = lane < DIM
    SERIES: tl.constexpr = 2 if OVERLAPS else 1
    has_state = (alone == 0) & (before >= 0)
    stored = states + tl.maximum(before, 0) // PAGE * BLOCK_NUMBERS + first + lane
    held = inside & has_state
    OWN: tl.constexpr = (SERIES - 1) * DIM  # the last series is that of the window's own entry
    peak = tl.load(stored + OWN, mask=held, other=float("-inf"))
    total = tl.load(stored + SERIES * DIM + OWN, mask=held, other=0.0)
    acc = tl.load(stored + 2 * SERIES * DIM + OWN, mask=held, other=0.0)
    if OVERLAPS:
        next_peak = tl.load(stored, mask=held, other=float("-inf"))
        next_total = tl.load(stored + SERIES * DIM, mask=held, other=0.0)
        next_acc = tl.load(stored + 2 * SERIES * DIM, mask=held, other=0.0)
    at = tl.where(alone, token - need, token)
    goes_on = True
    while goes_on:
        position = tl.load(positions + at)
        place = position % RATE
        slot = tl.load(slots + at)
        row, offset = projected + at * row_stride + lane, bias + place * (SERIES * DIM) + lane
        gates = row + SERIES * DIM
        if OVERLAPS:
            gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32) + tl.load(offset, mask=inside, other=0.0)
            vector = tl.load(row, mask=inside, other=0.0).to(tl.float32)
            next_peak, next_total, next_acc = _added(next_peak, next_total, next_acc, gate, vector)
        elif place == 0:
            peak = tl.full([BLOCK_DIM], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_DIM], tl.float32)
            acc = tl.zeros([BLOCK_DIM], tl.float32)
        gate = tl.load(gates + OWN, mask=inside, other=0.0).to(tl.float32)
        gate += tl.load(offset + OWN, mask=inside, other=0.0)
        vector = tl.load(row + OWN, mask=inside, other=0.0).to(tl.float32)
        peak, total, acc = _added(peak, total, acc, gate, vector)
        wanted = (alone == 0) | (at == token)
        if place == RATE - 1:
            entry_slot = tl.load(entry_slots + at)
            if wanted & (entry_slot >= 0):
                mean = tl.where(inside, acc / total, 0.0)
                normed = mean * tl.rsqrt(tl.sum(mean * mean, axis=0) / DIM + eps)
                normed *= tl.load(norm + lane, mask=inside, other=0.0)
                # The elements of a pair are in different threads, which exchange them in memory.
                tl.store(scratch + token * DIM + lane, normed, mask=inside)
                tl.debug_barrier()
                turned = inside & (lane >= DIM - 2 * PAIRS)
                pair = tl.where(turned, lane - (DIM - 2 * PAIRS), 0)
                partner = tl.load(scratch + token * DIM + DIM - 2 * PAIRS + (pair ^ 1), mask=turned, other=0.0)
                tl.debug_barrier()
                angle = (position + 1 - RATE) * PAIRS + pair // 2
                c = tl.load(cos + angle, mask=turned, other=1.0)
                s = tl.load(sin + angle, mask=turned, other=0.0)
                result = normed * c + partner * tl.where(pair % 2 == 0, -s, s)
                to = entries + (entry_slot - back) * WIDTH + column + lane
                tl.store(to, result.to(entries.dtype.element_ty), mask=inside)
            if OVERLAPS:
                peak, total, acc = next_peak, next_total, next_acc
                next_peak = tl.full([BLOCK_DIM], float("-inf"), tl.float32)
                next_total = tl.zeros([BLOCK_DIM], tl.float32)
                next_acc = tl.zeros([BLOCK_DIM], tl.float32)
            else:
                peak = tl.full([BLOCK_DIM], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_DIM], tl.float32)
                acc = tl.zeros([BLOCK_DIM], tl.float32)
        after = tl.minimum(at + 1, last)
        same = (after > at) & (slot >= 0) & (tl.load(slots + slot_stride + after) == slot)
        if wanted & (slot >= 0) & ((slot % PAGE == PAGE - 1) | (same == 0)):
            to = states + slot // PAGE * BLOCK_NUMBERS + first + lane
            tl.store(to + OWN, peak, mask=inside)
            tl.store(to + SERIES * DIM + OWN, total, mask=inside)
            tl.store(to + 2 * SERIES * DIM + OWN, acc, mask=inside)
            if OVERLAPS:
                tl.store(to, next_peak, mask=inside)
                tl.store(to + SERIES * DIM, next_total, mask=inside)
                tl.store(to + 2 * SERIES * DIM, next_acc, mask=inside)
        # The first tokens of a sequence in this step go on until a token's windows all begin in the step.
        next_need = tl.load(positions + after) % RATE + (RATE if OVERLAPS else 0)
        goes_on = tl.where(alone, at < token, same & (after - token < next_need))
        at = after


def compress(
    projected: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    entry_slots: torch.Tensor,
    states: torch.Tensor,
    entries: torch.Tensor,
    shape: Compression,
) -> None:
    """Compute compress_reference. Rows of projected and of slots are contiguous, and the other tensors altogether."""
    tokens, numbers = len(projected), states.flatten(1).view(torch.float32)
    scratch = torch.empty(tokens, shape.dim, dtype=torch.float32, device=projected.device)
    _compress_kernel[(tokens,)](
        projected, bias, norm, *rotary, positions, slots, entry_slots, numbers, entries, scratch, eps, tokens,
        slots.stride(0), projected.stride(0), shape.first, window_rows(shape.rate) - 1 - shape.row, shape.column,
        DIM=shape.dim, BLOCK_DIM=triton.next_power_of_2(shape.dim), RATE=shape.rate, OVERLAPS=shape.overlaps,
        PAIRS=rotary[0].shape[1], PAGE=states.shape[1], WIDTH=entries.shape[3], BLOCK_NUMBERS=numbers.shape[1],
        LANES=triton.next_power_of_2(shape.series * shape.rate), num_warps=4, **overlap_options(projected.device),
    )  # fmt: skip
