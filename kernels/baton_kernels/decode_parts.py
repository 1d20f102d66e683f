"""How the sequences of a decode step are cut into parts, so that one long sequence does not outlast all others.

Decode attention runs one program per part and KV head. A part holds at most as many tiles of keys as the step has tiles
for each of `capacity` programs, so that no program has more than its share of the work. Sequences that are not longer
than that stay whole.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """The parts of the sequences of a decode step, int32 tensors on the device.

    firsts: [S + 1], the first part of each sequence; the parts of one sequence are neighbours. owners: [S + capacity],
    the sequence of each part; -1 = there is no such part. arrivals: [at least S * kv_heads], zero between two launches:
    how many parts of a sequence are done, by which the last one knows that it has to join them.
    """

    firsts: torch.Tensor
    owners: torch.Tensor
    arrivals: torch.Tensor


def parts_reference(lengths: list[int], capacity: int, block_keys: int) -> tuple[list[int], list[int]]:
    """Return firsts and owners as DecodeParts has them. lengths: tokens of each sequence, at least 1."""
    tiles = [-(-length // block_keys) for length in lengths]
    span = max(-(-sum(tiles) // capacity), 1)
    firsts, owners = [0], []
    for sequence, count in enumerate(tiles):
        owners += [sequence] * -(-count // span)
        firsts.append(len(owners))
    return firsts, owners + [-1] * (len(lengths) + capacity - len(owners))


# One compiled kernel serves all batches: compilation would halt a service for half a second.
@triton.jit(do_not_specialize=["count", "slots", "capacity"])
def _parts_kernel(
    lengths, firsts, owners, count, slots, capacity,
    BLOCK_KEYS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_inputs(OVERLAP)
    lane = tl.arange(0, BLOCK)
    for first in range(0, slots, BLOCK):
        tl.store(owners + first + lane, -1, mask=first + lane < slots)
    total = 0
    for first in range(0, count, BLOCK):
        length = tl.load(lengths + first + lane, mask=first + lane < count, other=0)
        total += tl.sum(tl.cdiv(length, BLOCK_KEYS), axis=0)
    span = tl.maximum(tl.cdiv(total, capacity), 1)
    # The owners below must not be overwritten by the -1 above, which other threads store.
    tl.debug_barrier()
    before = 0
    for first in range(0, count, BLOCK):
        sequence = first + lane
        inside = sequence < count
        length = tl.load(lengths + sequence, mask=inside, other=0)
        parts = tl.cdiv(tl.cdiv(length, BLOCK_KEYS), span)
        begin = before + tl.cumsum(parts, axis=0) - parts
        tl.store(firsts + sequence, begin, mask=inside)
        for part in range(0, tl.max(parts, axis=0)):
            tl.store(owners + begin + part, sequence, mask=inside & (part < parts))
        before += tl.sum(parts, axis=0)
    tl.store(firsts + count, before)


def plan_parts(lengths: torch.Tensor, capacity: int, block_keys: int, arrivals: torch.Tensor) -> DecodeParts:
    """Return the parts of sequences with these lengths, [S] int32, at least 1.

    capacity: parts at which the device is full. block_keys: keys of a tile. arrivals: as in DecodeParts.
    """
    count = len(lengths)
    firsts = lengths.new_empty(count + 1)
    owners = lengths.new_empty(count + capacity)
    _parts_kernel[(1,)](
        lengths, firsts, owners, count, len(owners), capacity,
        BLOCK_KEYS=block_keys, BLOCK=_BLOCK, num_warps=4, **overlap_options(lengths.device),
    )  # fmt: skip
    return DecodeParts(firsts, owners, arrivals)
