"""All-reduce between GPUs that read and write each other's memory.

Pushed, each rank writes its message into the memory of every other rank, and reads those of the others from its own
memory. Each word of 4 bytes travels beside a mark, the number of the sum, in one store of 8 bytes, so a word has
arrived when its mark has (NCCL's protocol LL). This sends twice as many bytes, but they cross the link once, one way,
and no rank waits at a barrier.

In one step (a one-shot all-reduce), each rank copies its message into memory that all ranks read, waits at a barrier
for the other ranks, and adds up all messages. That takes one barrier per sum, where a ring takes at least one exchange
per rank. No second barrier is needed after reading, because the memory has two halves that are used in turn: a rank
writes to a half again only after the barrier of the next sum, which all ranks reach after reading this half.

In two steps, each rank adds up one part of the message and then reads the other parts from the ranks that have added
them up. With more than two ranks, each rank reads fewer bytes like this: 1.5 messages instead of 3 with four ranks.
"""

import torch
import triton
import triton.language as tl

from .overlap import let_next_start, overlap_options, wait_for_inputs

VECTOR_BYTES = 16  # bytes that a thread reads or writes at once; the size of a message is a multiple of it
_PROGRAM_BYTES = 128 * VECTOR_BYTES  # bytes of a message that one program adds up
_PUSHED_BYTES = _PROGRAM_BYTES // 2  # the same where they travel with marks, which need as many bytes


@triton.jit
def _numbers(words, kind: tl.constexpr, SIZE: tl.constexpr):
    """Return the numbers of SIZE bytes in words [n] of 4 bytes, as float32 [4 n / SIZE]."""
    if SIZE == 4:
        numbers = words.to(kind, bitcast=True)
    else:
        halves = tl.reshape(tl.join(words, words >> 16), (2 * words.shape[0],))
        numbers = halves.to(tl.int16).to(kind, bitcast=True)
    return numbers.to(tl.float32)


@triton.jit
def _memory_of(rank, memories, kind: tl.constexpr):
    return tl.multiple_of(tl.load(memories + rank).to(kind), 16)


@triton.jit
def _barrier(flags, program, count, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Signal to the other ranks that this program has reached `count`, and wait until the same programs there have."""
    # All threads of this program must have stored their values before any other rank is told.
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
    """Return the sum of all ranks' values in float32."""
    # All ranks add in the order of ranks, so that their results are bitwise equal.
    acc = tl.zeros(own.shape, tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            acc += own.to(tl.float32)
        else:
            # The load must bypass this GPU's caches, which do not see what other GPUs write.
            part = tl.load(_memory_of(rank, memories, kind) + at, mask=real, other=0.0, volatile=True)
            acc += part.to(tl.float32)
    return acc


# One compiled kernel serves messages of all sizes.
@triton.jit(do_not_specialize=["vectors"])
def _pushed_sum_kernel(
    words, out, memories, counts, vectors, room, RANK: tl.constexpr, RANKS: tl.constexpr, WORDS: tl.constexpr,
    SIZE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    program = tl.program_id(0)
    at = program * WORDS + tl.arange(0, WORDS)
    real = at < vectors * 4
    wait_for_inputs(OVERLAP)
    count = tl.load(counts + program) + 1
    # Two sums ago, words arrived in this half. Every rank has read them, because a rank sends words of a later sum only
    # after it has finished the earlier one, and words of the last sum have arrived from all ranks.
    half = count % 2 * RANKS * room
    mark = (count & 0xFFFFFFFF) << 32
    own = tl.load(words + at, mask=real, other=0)
    marked = mark | (own.to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = _memory_of(rank, memories, tl.pointer_type(tl.int64))
            tl.store(theirs + half + RANK * room + at, marked, mask=real)
    # All ranks add in the order of ranks, so that their results are bitwise equal.
    total = tl.zeros((4 // SIZE * WORDS,), tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += _numbers(own, out.dtype.element_ty, SIZE)
        else:
            arriving = _memory_of(RANK, memories, tl.pointer_type(tl.int64)) + half + rank * room + at
            # The load must bypass the caches, which do not see what other GPUs write.
            part = tl.load(arriving, mask=real, other=0, volatile=True)
            while tl.max((tl.where(real, (part ^ mark) >> 32, 0) != 0).to(tl.int32), axis=0) > 0:
                part = tl.load(arriving, mask=real, other=0, volatile=True)
            total += _numbers(part.to(tl.int32), out.dtype.element_ty, SIZE)
    here = program * (4 // SIZE * WORDS) + tl.arange(0, 4 // SIZE * WORDS)
    tl.store(out + here, total.to(out.dtype.element_ty), mask=here < vectors * (16 // SIZE))
    tl.store(counts + program, count)


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
    _barrier(flags, program, count, RANK, RANKS)
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
    # No rank still reads this memory: the second barrier of the last sum came after all of them had read it.
    tl.store(_memory_of(RANK, memories, kind) + at, tl.load(y + at, mask=real, other=0.0), mask=real)
    own = tl.load(y + own_at, mask=own_real, other=0.0)
    _barrier(flags, program, count + 1, RANK, RANKS)
    total = _sum_of(own, memories, own_at, own_real, kind, RANK, RANKS).to(out.dtype.element_ty)
    # All ranks have begun this sum, so they have read the results of the last one.
    tl.store(_memory_of(RANK, sums, kind) + own_at, total, mask=own_real)
    _barrier(flags, program, count + 2, RANK, RANKS)
    # All parts are loaded before any is stored. Offsets from one pointer let a thread load 16 bytes at once.
    away = (tl.load(sums + rank, mask=rank < RANKS, other=0) - tl.load(sums + RANK)) // (16 // VECTOR)
    theirs = _memory_of(RANK, sums, kind) + tl.multiple_of(away, (VECTOR, VECTOR))
    tl.store(out + at, tl.load(theirs + at, mask=real, other=0.0, volatile=True), mask=real)
    tl.store(counts + program, count + 2)


def programs_of(size: int, parts: int = 1) -> int:
    """Return how many programs add up a message of `size` bytes. parts: per program; in two steps, one for each
    rank."""
    return -(-size // (parts * _PROGRAM_BYTES))


def pushing_programs_of(size: int) -> int:
    """Return how many programs push and add up a message of `size` bytes."""
    return -(-size // _PUSHED_BYTES)


def pushed_rank_sum(
    y: torch.Tensor, memories: torch.Tensor, counts: torch.Tensor, room: int, rank: int
) -> torch.Tensor:
    """Return the sum of the ranks' y, which all of them pass at the same time.

    y: contiguous, of VECTOR_BYTES or a multiple, and of at most room bytes. memories: [ranks] int64, the addresses at
    which each rank has memory of 4 * ranks * room bytes. counts: [programs] int64 of this rank alone. Memory and counts
    are zero at first.
    """
    out = torch.empty_like(y)
    _pushed_sum_kernel[(pushing_programs_of(y.nbytes),)](
        y.view(-1).view(torch.int32), out, memories, counts, y.nbytes // VECTOR_BYTES, room // 4, RANK=rank,
        RANKS=len(memories), WORDS=_PUSHED_BYTES // 4, SIZE=y.element_size(), num_warps=4, **overlap_options(y.device),
    )  # fmt: skip
    return out


def rank_sum(
    y: torch.Tensor, memories: torch.Tensor, flags: torch.Tensor, counts: torch.Tensor, half: int, rank: int
) -> torch.Tensor:
    """Do the same as pushed_rank_sum in one step.

    y: at most half bytes. memories, flags: [ranks] int64, the addresses at which each rank has memory of 2 * half
    bytes, and int64 flags [programs, ranks]. counts: as in pushed_rank_sum, but not the same ones. Flags and counts are
    zero at first.
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
    """Do the same as pushed_rank_sum in two steps.

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
