"""Sums over the memory of several ranks. The interpreter runs one rank, and the test does what the others would; for
pushed sums two processes are two ranks."""

from multiprocessing import get_context

import pytest
import torch

from baton_kernels.rank_sums import (
    programs_of,
    pushed_rank_sum,
    pushing_programs_of,
    rank_sum,
    two_step_rank_sum,
)

from .conftest import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the memory of the other ranks is that of this process")
SIZES = pytest.mark.parametrize(("rows", "columns"), [(1, 8), (3, 520), (7, 1024)])
RANKS = pytest.mark.parametrize("rank", [0, 2])


def _marked(message: torch.Tensor, count: int) -> torch.Tensor:
    """Return the words of a message beside the number of its sum."""
    return message.flatten().view(torch.int32).to(torch.int64) & 0xFFFFFFFF | count << 32


@RANKS
@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pushed_sums_are_those_of_all_ranks_in_order(rank: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    ranks, room = 3, 1 << 15
    memories = [torch.zeros(2, ranks, room // 4, dtype=torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    # The number of a sum no longer fits into 32 bits in the third one.
    first = (1 << 32) - 2
    counts = torch.full((pushing_programs_of(room),), first, dtype=torch.int64)
    generator = torch.Generator().manual_seed(rows)
    messages = [[torch.randn(rows, columns, generator=generator) for _ in range(ranks)] for _ in range(5)]
    if dtype != torch.float32:
        # Whole numbers, as the interpreter cuts results off that a GPU rounds.
        messages = [[(16 * message).round().to(dtype) for message in each] for each in messages]
    words = messages[0][0].nbytes // 4
    for number in range(1, 5):
        count = first + number
        for other in set(range(ranks)) - {rank}:
            memories[rank][count % 2, other, :words] = _marked(messages[number - 1][other], count % (1 << 32))
            if other == 1 and number < 4:  # has begun the next sum already
                memories[rank][1 - count % 2, other, :words] = _marked(messages[number][other], (count + 1) % (1 << 32))
        out = pushed_rank_sum(messages[number - 1][rank], addresses, counts, room, rank)
        expected = sum(message.float() for message in messages[number - 1])
        assert torch.equal(out, expected.to(dtype))
        for other in set(range(ranks)) - {rank}:
            sent = memories[other][count % 2, rank]
            assert torch.equal(sent[:words], _marked(messages[number - 1][rank], count % (1 << 32)))
            assert not sent[words:].any()
        assert counts[: pushing_programs_of(4 * words)].eq(count).all()


@pytest.mark.processes
def test_pushed_sums_of_ranks_that_run_at_the_same_time() -> None:
    room, sums = 1 << 13, 20
    memories = [torch.zeros(2, 2, room // 4, dtype=torch.int64).share_memory_() for _ in range(2)]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, room // 16 + 1, (sums,), generator=generator).tolist()
    messages = [[torch.randn(4 * size, generator=generator) for size in sizes] for _ in range(2)]
    found = torch.zeros(2, sum(map(len, messages[0]))).share_memory_()

    def run(rank: int) -> None:
        counts = torch.zeros(pushing_programs_of(room), dtype=torch.int64)
        torch.cat([pushed_rank_sum(y, addresses, counts, room, rank) for y in messages[rank]], out=found[rank])

    # The interpreter runs one kernel of a process at a time.
    other = get_context("fork").Process(target=run, args=(1,), daemon=True)
    other.start()
    run(0)
    other.join()
    expected = torch.cat(messages[0]) + torch.cat(messages[1])
    assert torch.equal(found, expected.expand(2, -1))


@RANKS
@SIZES
def test_sums_are_those_of_all_ranks_in_order(rank: int, rows: int, columns: int) -> None:
    ranks, half = 3, 1 << 15
    programs = programs_of(half)
    memories = [torch.zeros(2, half // 4) for _ in range(ranks)]
    flags = [torch.zeros(programs, ranks, dtype=torch.int64) for _ in range(ranks)]
    counts = torch.zeros(programs, dtype=torch.int64)
    addresses = [torch.tensor([each.data_ptr() for each in part]) for part in (memories, flags)]
    used = programs_of(rows * columns * 4)
    generator = torch.Generator().manual_seed(rows)
    for count in range(1, 4):
        messages = [torch.randn(rows, columns, generator=generator) for _ in range(ranks)]
        for other in set(range(ranks)) - {rank}:
            memories[other][count % 2, : rows * columns] = messages[other].flatten()
            # Another rank may have begun the next sum already.
            flags[rank][:, other] = count + other % 2
        out = rank_sum(messages[rank], addresses[0], addresses[1], counts, half, rank)
        assert torch.equal(out, messages[0] + messages[1] + messages[2])
        assert torch.equal(memories[rank][count % 2, : rows * columns], messages[rank].flatten())
        assert counts.tolist() == [count] * used + [0] * (programs - used)
        for other in set(range(ranks)) - {rank}:
            assert flags[other][:, rank].tolist() == [count] * used + [0] * (programs - used)


@RANKS
@SIZES
def test_two_steps_have_the_same_sums(rank: int, rows: int, columns: int) -> None:
    ranks, size = 3, rows * columns * 4
    used = programs_of(size, ranks)
    memories, sums = ([torch.zeros(1 << 13) for _ in range(ranks)] for _ in range(2))
    flags = [torch.zeros(used + 1, ranks, dtype=torch.int64) for _ in range(ranks)]
    counts = torch.zeros(used + 1, dtype=torch.int64)
    addresses = [torch.tensor([each.data_ptr() for each in part]) for part in (memories, sums, flags)]
    generator = torch.Generator().manual_seed(rows)
    # The numbers of a program that each rank adds up follow each other.
    owner = torch.arange(rows * columns) // 512 % ranks
    for count in range(1, 4):
        messages = [torch.randn(rows, columns, generator=generator) for _ in range(ranks)]
        expected = messages[0] + messages[1] + messages[2]
        for other in set(range(ranks)) - {rank}:
            memories[other][: rows * columns] = messages[other].flatten()
            sums[other][: rows * columns] = expected.flatten().where(owner == other, float("nan"))
            # Another rank may have begun the next sum already.
            flags[rank][:, other] = 2 * count + other % 2
        out = two_step_rank_sum(messages[rank], *addresses, counts, rank)
        assert torch.equal(out, expected)
        given, added = (part[rank][: rows * columns] for part in (memories, sums))
        assert torch.equal(given[owner != rank], messages[rank].flatten()[owner != rank])
        assert torch.equal(added[owner == rank], expected.flatten()[owner == rank])
        assert counts.tolist() == [2 * count] * used + [0]
        for other in set(range(ranks)) - {rank}:
            assert flags[other][:, rank].tolist() == [2 * count] * used + [0]
