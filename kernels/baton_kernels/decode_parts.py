"""Cuts the sequences of a decode step into parts, so that one long sequence does not take longer than all others.

Decode attention runs one program per part and KV head. A part has at most ceil(tiles of keys in the step / `capacity`)
tiles, so that no program gets more than its share of the work. Sequences of at most that length stay whole. Programs
start in the order of the plan. In larger batches the longest parts come first, so that short ones fill the gaps at the
end (Graham's rule of longest processing time).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs

# The fields of a part: its sequence (-1 marks an unused entry of the plan), its index among the parts of the sequence,
# the number of these parts, the sequence's length in tokens, and its row in the block tables.
SEQUENCE, PART, PARTS, LENGTH, ROW = range(5)
FIELDS = 5
TILE_KEYS = 64  # parts begin at multiples of this many keys
_MOST_LANES = 1024
# Plans of many sequences are ordered by classes of part lengths: the number of these classes, and the most sequences of
# a plan that is not ordered.
CLASSES = 8
FEW_SEQUENCES = 32


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """The parts of the sequences of a decode step, int32 tensors on the device.

    plan: [FIELDS, S + capacity], one column per part; the parts of a sequence are adjacent, in any order of sequences.
    spans: [2, S], the first part of each sequence, and the number of its parts. arrivals: [at least S * kv_heads],
    counts the finished parts of each sequence and KV head, so that the program that finishes last knows that it must
    merge them; zero between two launches.
    """

    plan: torch.Tensor
    spans: torch.Tensor
    arrivals: torch.Tensor


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["count", "slots", "capacity"])
def _parts_kernel(
    lengths, rows, plan, spans, count, slots, capacity,
    TILE: tl.constexpr, LANES: tl.constexpr, CLASSES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    lane = tl.arange(0, LANES)
    for first in range(0, slots, LANES):
        tl.store(plan + first + lane, -1, mask=first + lane < slots)
    total = 0
    for first in range(0, count, LANES):
        length = tl.load(lengths + first + lane, mask=first + lane < count, other=0)
        total += tl.sum(tl.cdiv(length, TILE), axis=0)
    span = tl.maximum(tl.cdiv(total, capacity), 1)
    # Without the barrier, other threads could still store their -1 over the entries written below.
    tl.debug_barrier()
    before = 0
    for number in tl.static_range(CLASSES):
        for first in range(0, count, LANES):
            sequence = first + lane
            inside = sequence < count
            length = tl.load(lengths + sequence, mask=inside, other=0)
            row = tl.load(rows + sequence, mask=inside, other=0).to(tl.int32)
            tiles = tl.cdiv(length, TILE)
            parts = tl.cdiv(tiles, span)
            if CLASSES > 1:
                # Sequences without tokens have no parts, and belong to the last class.
                own = tl.maximum(tl.cdiv(tiles, tl.maximum(parts, 1)) * CLASSES - 1, 0) // span
                inside = inside & (own == CLASSES - 1 - number)
                parts = tl.where(inside, parts, 0)
            begin = before + tl.cumsum(parts, axis=0) - parts
            tl.store(spans + sequence, begin, mask=inside)
            tl.store(spans + count + sequence, parts, mask=inside)
            for part in range(0, tl.max(parts, axis=0)):
                to = plan + begin + part
                there = inside & (part < parts)
                tl.store(to, sequence, mask=there)
                tl.store(to + slots, part, mask=there)
                tl.store(to + 2 * slots, parts, mask=there)
                tl.store(to + 3 * slots, length, mask=there)
                tl.store(to + 4 * slots, row, mask=there)
            before += tl.sum(parts, axis=0)


@triton.jit
def load_part(plan, slot, slots):
    """Return the fields of one entry of a plan: SEQUENCE, PART, PARTS, LENGTH, ROW.

    A kernel checks the first field after this call and not before: waiting for it alone would double the latency.
    """
    sequence = tl.load(plan + slot)
    part = tl.load(plan + slots + slot)
    parts = tl.load(plan + 2 * slots + slot)
    length = tl.load(plan + 3 * slots + slot)
    row = tl.load(plan + 4 * slots + slot)
    return sequence, part, parts, length, row


def plan_parts(lengths: torch.Tensor, rows: torch.Tensor, capacity: int, arrivals: torch.Tensor) -> DecodeParts:
    """Return the parts of the sequences of a step.

    lengths: [S] int32, the tokens of each sequence; one without tokens has no part. rows: [S] int32 or int64, its row
    in the block tables. capacity: the number of parts that fills the device. arrivals: as in DecodeParts.
    """
    count = len(lengths)
    lanes = min(max(triton.next_power_of_2(count), 32), _MOST_LANES)
    plan, spans = lengths.new_empty((FIELDS, count + capacity)), lengths.new_empty((2, count))
    _parts_kernel[(1,)](
        lengths, rows, plan, spans, count, count + capacity, capacity, TILE=TILE_KEYS, LANES=lanes,
        CLASSES=CLASSES if count > FEW_SEQUENCES else 1, num_warps=min(lanes // 32, 4),
        **overlap_options(lengths.device),
    )  # fmt: skip
    return DecodeParts(plan, spans, arrivals)
