"""Sums over GPUs that read each other's memory.

In one step (a one-shot all-reduce), each rank copies its message into memory that all ranks read, tells the others so,
waits until they have told it, and adds up the messages of all. That takes one exchange, where a ring takes one for each
rank and more. A sum is not followed by a second exchange: the next one uses the other half of the memory, and the one
after it begins on a rank only when all ranks have begun the next one, so they have read this one.

In two steps, each rank adds up one part of the message and then reads the other parts from the ranks that have added
them up. Of more than two ranks, each reads fewer bytes like this: 1.5 messages instead of 3 on four ranks.
"""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs

VECTOR_BYTES = 16  # that a thread reads and writes at once; messages consist of them
_PROGRAM_BYTES = 128 * VECTOR_BYTES  # of the part of a message that one program adds up


@triton.jit
def _memory_of(rank, memories, kind: tl.constexpr):
    return tl.multiple_of(tl.load(memories + rank).to(kind), 16)


@triton.jit
def _meet(flags, program, count, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell the other ranks that this program has come to `count`, and wait until theirs have."""
    # All threads of this program have stored their numbers before any other rank is told.
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = tl.load(flags + rank).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(theirs + program * RANKS + RANK, count, sem="release", scope="sys")
    told = tl.load(flags + RANK).to(tl.pointer_type(tl.int64)) + program * RANKS
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            while tl.atomic_add(told + rank, 0, sem="acquire", scope="sys") < count:
                pass
    tl.debug_barrier()


@triton.jit
def _sum_of(own, memories, at, real, kind: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Return the sum of all ranks' numbers in float32."""
    # In the order of ranks, so that the sums of all ranks are equal to the bit.
    acc = tl.zeros(own.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            acc += own.to(tl.float32)
        else:
            # No cache of this GPU may answer, as it does not see what others write.
            part = tl.load(_memory_of(rank, memories, kind) + at, mask=real, other=0.0, volatile=True)
            acc += part.to(tl.float32)
    return acc


# One compiled kernel serves messages of all sizes.
@triton.jit(do_not_specialize=["vectors"])
def _rank_sum_kernel(
    y, out, memories, flags, counts, vectors, half, RANK: tl.constexpr, RANKS: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # The next kernel may fetch its weights while this one waits for other ranks.
    let_next_start(OVERLAP)
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    real = at < vectors * VECTOR
    kind: tl.constexpr = tl.pointer_type(y.dtype.element_ty)
    wait_for_inputs(OVERLAP)
    count = tl.load(counts + program) + 1
    at_shared = at + count % 2 * half
    own = tl.load(y + at, mask=real, other=0.0)
    tl.store(_memory_of(RANK, memories, kind) + at_shared, own, mask=real)
    _meet(flags, program, count, RANK, RANKS)
    acc = _sum_of(own, memories, at_shared, real, kind, RANK, RANKS)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=real)
    tl.store(counts + program, count)


@triton.jit(do_not_specialize=["vectors"])
def _two_step_kernel(
    y, out, memories, sums, flags, counts, vectors, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    VECTOR: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    program = tl.program_id(0)
    size = vectors * VECTOR
    kind: tl.constexpr = tl.pointer_type(y.dtype.element_ty)
    # The part of each rank, and the part of this one.
    rank = tl.arange(0, BLOCK_RANKS)[:, None]
    at = program * RANKS * PART + rank * PART + tl.arange(0, PART)[None, :]
    real = (rank < RANKS) & (at < size)
    own_at = (program * RANKS + RANK) * PART + tl.arange(0, PART)
    own_real = own_at < size
    wait_for_inputs(OVERLAP)
    count = tl.load(counts + program)
    # No rank still reads this memory: all of them have met after reading it, in the middle of the last sum.
    tl.store(_memory_of(RANK, memories, kind) + at, tl.load(y + at, mask=real, other=0.0), mask=real)
    own = tl.load(y + own_at, mask=own_real, other=0.0)
    _meet(flags, program, count + 1, RANK, RANKS)
    total = _sum_of(own, memories, own_at, own_real, kind, RANK, RANKS).to(out.dtype.element_ty)
    # All ranks have begun this sum, so they have read the last one.
    tl.store(_memory_of(RANK, sums, kind) + own_at, total, mask=own_real)
    _meet(flags, program, count + 2, RANK, RANKS)
    # All parts are loaded before any is stored. Distances from one pointer let a thread load 16 bytes at once.
    away = (tl.load(sums + rank, mask=rank < RANKS, other=0) - tl.load(sums + RANK)) // (16 // VECTOR)
    theirs = _memory_of(RANK, sums, kind) + tl.multiple_of(away, (VECTOR, VECTOR))
    tl.store(out + at, tl.load(theirs + at, mask=real, other=0.0, volatile=True), mask=real)
    tl.store(counts + program, count + 2)


def programs_of(size: int, parts: int = 1) -> int:
    """Return how many programs add up a message of so many bytes. parts: that each has; in two steps one for a rank."""
    return -(-size // (parts * _PROGRAM_BYTES))


def rank_sum(
    y: torch.Tensor, memories: torch.Tensor, flags: torch.Tensor, counts: torch.Tensor, half: int, rank: int
) -> torch.Tensor:
    """Return the sum of the ranks' y, which all of them pass at the same time.

    y: contiguous, of VECTOR_BYTES or a multiple, and of at most half bytes. memories, flags: [ranks] int64, the
    addresses at which each rank has memory of 2 * half bytes, and int64 flags [programs, ranks], which are zero at
    first. counts: [programs] int64 of this rank alone, zero at first.
    """
    out = torch.empty_like(y)
    _rank_sum_kernel[(programs_of(y.nbytes),)](
        y, out, memories, flags, counts, y.nbytes // VECTOR_BYTES, half // y.element_size(), RANK=rank,
        RANKS=len(memories), VECTOR=VECTOR_BYTES // y.element_size(), BLOCK=_PROGRAM_BYTES // y.element_size(),
        num_warps=4, **overlap_options(y.device),
    )  # fmt: skip
    return out


def two_step_rank_sum(
    y: torch.Tensor, memories: torch.Tensor, sums: torch.Tensor, flags: torch.Tensor, counts: torch.Tensor, rank: int
) -> torch.Tensor:
    """Do the same as rank_sum in two steps.

    memories, sums: [ranks] int64, the addresses at which each rank has memory of y's size. flags, counts: as in
    rank_sum, but not the same ones.
    """
    out, ranks = torch.empty_like(y), len(memories)
    _two_step_kernel[(programs_of(y.nbytes, ranks),)](
        y, out, memories, sums, flags, counts, y.nbytes // VECTOR_BYTES, RANK=rank, RANKS=ranks,
        BLOCK_RANKS=triton.next_power_of_2(ranks), VECTOR=VECTOR_BYTES // y.element_size(),
        PART=_PROGRAM_BYTES // y.element_size(), num_warps=4, **overlap_options(y.device),
    )  # fmt: skip
    return out
