"""The rows to which queries of compressed attention attend, and the selection of entries by their index keys."""

import torch

from baton_kernels.decode_parts import plan_parts
from baton_kernels.entry_slots import entry_slots
from baton_kernels.index_scores import index_scores, select_numbers
from baton_kernels.reference.compression import window_rows
from baton_kernels.reference.indexed import index_scores_reference, selection_reference

PAGE, BLOCKS, RATE, WINDOW, WIDTH = 8, 40, 4, 6, 24


def rows_of(table: torch.Tensor, positions: torch.Tensor, first: int) -> list[int]:
    """Return the rows of some tokens in a layer whose first row is given."""
    rows: list[int] = (first + table[positions // PAGE] * PAGE + positions % PAGE).tolist()
    return rows


def test_the_rows_of_windows_and_of_entries(device: torch.device) -> None:
    lengths, rows = torch.tensor([1, 5, 6, 30, 31, 40]), torch.tensor([2, 0, 1, 1, 0, 2])
    key_tables, entry_tables = torch.randperm(BLOCKS)[:36].int().view(2, 3, 6)
    numbers = torch.tensor([[0, 9], [0, 9], [0, 9], [2, 6], [0, 1], [8, 9]], dtype=torch.int32)
    on_device = [each.to(device) for each in (lengths.int(), rows, key_tables, entry_tables, numbers)]
    for rate, chosen in ((0, None), (RATE, None), (16, None), (RATE, numbers)):
        width = WINDOW + (40 // rate if rate else 0)
        given = {"rate": rate, "entry_tables": on_device[3], "entry_row": 1003} if rate else {}
        given |= {} if chosen is None else {"numbers": on_device[4]}
        found = entry_slots(*on_device[:3], 500, WINDOW, width, PAGE, **given).cpu()
        for query, (length, row) in enumerate(zip(lengths.tolist(), rows.tolist(), strict=True)):
            expected = rows_of(key_tables[row], torch.arange(max(length - WINDOW, 0), length), 500)
            if rate:
                ended = torch.arange(length // rate)
                if chosen is not None:
                    ended = chosen[query, : len(ended)].long()
                expected += rows_of(entry_tables[row], ended * rate + rate - window_rows(rate), 1003)
            assert found[query, : len(expected)].tolist() == expected


def test_entries_are_selected_by_their_index_keys(device: torch.device) -> None:
    """Three decodes, and then seven tokens of a chunk in groups of four."""
    heads, dim, most, column = 3, 8, 3, 16
    plane = torch.full((BLOCKS, PAGE, 1, WIDTH), float("nan"), device=device)
    tables = torch.randperm(BLOCKS)[:24].int().view(4, 6)
    lengths = torch.tensor([3, 17, 40, *range(18, 25)])
    rows = torch.tensor([0, 1, 2, *[3] * 7])
    q, weights = torch.randn(10, heads, dim, device=device), torch.randn(10, heads, device=device)
    keys = torch.randn(4, 10, dim, device=device)
    for sequence, length in enumerate((3, 17, 40, 24)):
        ended = torch.arange(length // RATE) * RATE + RATE - 1
        places = tables[sequence, ended // PAGE].long(), ended % PAGE
        plane[places[0], places[1], 0, column : column + dim] = keys[sequence, : len(ended)]
    none = torch.empty(0, dtype=torch.int32, device=device)
    index_keys, on_device = plane[..., column : column + dim], tables.to(device)
    calls = [(slice(3), 1, None, lengths[:3], rows[:3]),
             (slice(3, 10), 4, torch.tensor([0, 4, 7]), torch.tensor([21, 24]), rows[3:5])]  # fmt: skip
    for part, tokens, firsts, group_lengths, group_rows in calls:
        plan = plan_parts((group_lengths // RATE).int().to(device), group_rows.to(device), 8, none)
        starts = None if firsts is None else firsts.int().to(device)
        scores = index_scores(q[part], weights[part], index_keys, on_device, plan, 10, tokens, starts, RATE)
        ended = (lengths[part] // RATE).int()
        numbers = select_numbers(scores[:, None], ended.to(device), 1, most)
        for at, (count, row) in enumerate(zip(ended.tolist(), rows[part].tolist(), strict=True)):
            query = slice(part.start + at if part.start else at, None)
            expected = index_scores_reference(q[query][:1], weights[query][:1], keys[row, :count])[0]
            torch.testing.assert_close(scores[at, :count], expected, rtol=1e-4, atol=1e-4)
            chosen = selection_reference(scores[at, :count], torch.ones(count, dtype=torch.bool, device=device), most)
            assert numbers[at, : min(count, most)].tolist() == chosen.nonzero()[:, 0].tolist()
