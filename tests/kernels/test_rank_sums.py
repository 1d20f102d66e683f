"""Sums over the memory of several ranks. The interpreter runs one rank, and the test does what the others would."""

import pytest
import torch

from baton_kernels.rank_sums import programs_of, rank_sum, two_step_rank_sum

SIZES = pytest.mark.parametrize(("rows", "columns"), [(1, 8), (3, 520), (7, 1024)])
RANKS = pytest.mark.parametrize("rank", [0, 2])


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
