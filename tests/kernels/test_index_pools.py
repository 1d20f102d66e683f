"""The keys of groups of tokens, and the slots of the tokens of selected groups."""

import pytest
import torch

from baton_kernels.index_pools import pool_index_keys, pool_slots
from baton_kernels.reference.index_pools import pool_index_keys_reference

from .closeness import poisoned, relative_error

PAGE, BLOCKS, DIM, EPS = 12, 9, 6, 1e-6


def expected_keys(projected: torch.Tensor, norm: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the index keys of all tokens of a sequence, and those of its groups in place of their last tokens', by the
    definition in float64."""
    keys, gates = projected.double().split(DIM, dim=1)
    centered = keys - keys.mean(1, keepdim=True)
    keys = centered / (centered.square().mean(1, keepdim=True) + EPS).sqrt() * norm[0].double() + norm[1].double()
    rows, size = torch.cat([keys, gates], dim=1), len(offsets)
    for first in range(0, len(keys) // size * size, size):
        own = slice(first, first + size)
        shares = (gates[own] + offsets.double()).softmax(0)
        rows[first + size - 1, :DIM] = (shares * keys[own]).sum(0)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [2, 4, 12])
def test_groups_that_end_in_later_steps(device: torch.device, size: int, dtype: torch.dtype) -> None:
    """Two sequences in several steps, each with one token that has no slot."""
    norm, offsets = torch.randn(2, DIM, device=device), torch.randn(size, DIM, device=device)
    counts, order = (29, 26), torch.randperm(BLOCKS)
    # Rows of the projection have something else at their end.
    given = [torch.randn(count, 2 * DIM + 3, device=device).to(dtype)[:, : 2 * DIM] for count in counts]
    tables = order[:3], order[3:6]
    for function in (pool_index_keys, pool_index_keys_reference):
        rows = poisoned(BLOCKS, PAGE, 1, 2 * DIM, like=given[0])
        for first, second in (((0, 1), (0, 10)), ((1, 6), (10, 11)), ((6, 29), (11, 26))):
            parts = [(0, torch.arange(*first)), (1, torch.arange(*second))]
            projected = torch.cat([given[at][own.to(device)] for at, own in parts] + [given[0][:1]])
            slots = [tables[at][own // PAGE] * PAGE + own % PAGE for at, own in parts]
            positions = torch.cat([own for _, own in parts] + [torch.tensor([size - 1])]).to(device)
            all_slots = torch.cat([*slots, torch.tensor([-1])]).to(device)
            function(projected, *norm, EPS, offsets, positions, all_slots, rows)
        for at, count in enumerate(counts):
            own = torch.arange(count)
            written = rows.cpu()[tables[at][own // PAGE], own % PAGE, 0]
            expected = expected_keys(given[at].cpu(), norm.cpu(), offsets.cpu())
            assert relative_error(written, expected) < (1e-6 if dtype == torch.float32 else 1e-3)
        assert int(rows.isnan().all(-1).sum()) == BLOCKS * PAGE - sum(counts), "only these slots"


def test_numbers_that_are_not_finite(device: torch.device) -> None:
    """They stay within their channel, or within their sequence's group where the norm spreads them."""
    size = 4
    norm, offsets = torch.ones(2, DIM, device=device), torch.zeros(size, DIM, device=device)
    projected = torch.randn(3 * size, 2 * DIM, device=device)
    projected[1, DIM], projected[2, DIM + 1] = float("-inf"), float("inf")
    projected[:size, DIM + 2], projected[3, DIM + 3] = float("-inf"), float("nan")
    projected[size + 1, 0] = float("inf")
    positions, slots = torch.arange(3 * size, device=device), torch.arange(3 * size, device=device)
    found = []
    for function in (pool_index_keys, pool_index_keys_reference):
        rows = poisoned(1, 3 * size, 1, 2 * DIM, like=projected)
        function(projected, *norm, EPS, offsets, positions, slots, rows)
        found.append(rows[0, size - 1 :: size, 0, :DIM])
    torch.testing.assert_close(*found, equal_nan=True)
    assert found[0][0].isnan().tolist() == [False, True, True, True, False, False]
    assert found[0][1].isnan().all()
    assert found[0][2].isfinite().all()


@pytest.mark.parametrize("block", [16, 512])
def test_slots_of_selected_groups(device: torch.device, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries that see less than a group, as many groups as are selected, and more."""
    monkeypatch.setattr("baton_kernels.index_pools._SLOTS", block)
    size, most = 4, 3
    lengths, rows = torch.tensor([1, 3, 4, 12, 15, 16, 35]), torch.tensor([2, 0, 1, 1, 0, 2, 1])
    tables = torch.randperm(BLOCKS).int().view(3, 3)
    numbers = torch.tensor([[9] * 3, [9] * 3, [0, 9, 9], [0, 1, 2], [0, 1, 2], [0, 2, 3], [1, 6, 7]])
    on_device = [each.to(device) for each in (numbers.int(), lengths.int(), rows, tables)]
    found = pool_slots(*on_device, PAGE, size).cpu()
    assert found.shape == (7, most * size + size - 1)
    for query, (length, row) in enumerate(zip(lengths.tolist(), rows.tolist(), strict=True)):
        positions = [
            int(number) * size + place
            for number in numbers[query, : min(length // size, most)]
            for place in range(size)
        ]
        positions += range(length // size * size, length)
        expected = [int(tables[row, at // PAGE]) * PAGE + at % PAGE for at in positions]
        assert found[query, : len(expected)].tolist() == expected
