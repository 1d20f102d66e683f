"""Prefill attention with tiles whose keys are cut into parts, against a float64 softmax; and which tiles are cut."""

import dataclasses
import itertools
import random

import pytest
import torch

from baton_kernels.reference.paged_attention import AttentionVariant

from .closeness import poisoned, relative_error
from .test_attention import TOLERANCE, VARIANTS, Case, variant
from .test_kv_codes import Codes

# New tokens and all tokens of a sequence: of a long one that is cut, of one tile beside it that is not, of a short one
# whose last tile is not whole, and of one that has no new token.
CHUNKS = [(40, 500), (64, 64), (70, 460), (0, 10)]


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton_kernels.prefill_cuts._LEAST_KEYS", 64)


def attend(case: Case, q: torch.Tensor, starts: list[int], how: AttentionVariant, capacity: int) -> torch.Tensor:
    from baton_kernels.prefill_attention import prefill_attention, prefill_tiles
    from baton_kernels.prefill_cuts import TileCuts, cut_tiles

    queries = 64
    tiles = prefill_tiles(starts, queries)
    plan = cut_tiles(tiles, starts, case.lengths.tolist(), queries, how.window, capacity, chunked=how.chunked)
    assert plan is not None
    assert len(plan.columns[0]) > len(tiles[0])
    where, sequences, rows, which, joins = (
        torch.tensor(x, dtype=torch.int32, device=case.device) for x in (starts, *plan.columns)
    )
    cuts = TileCuts(which.view(3, -1), joins, plan.slots)
    return prefill_attention(
        q, case.keys, case.values, case.tables, case.lengths, where, (sequences, rows), how,
        poisoned(*q.shape[:2], case.value_dim, like=q), block_queries=queries, scales=getattr(case, "scales", None),
        cuts=cuts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "dim", "value_dim", "page", "dtype"),
    [
        *((kind, 2, 1, 64, 64, 16, torch.float32) for kind in VARIANTS),
        # The copy engine fetches whole blocks.
        *((kind, 2, 2, 80, 80, 64, torch.float16) for kind in ("plain", "all")),
        ("sinks", 2, 1, 48, 36, 16, torch.float32),
    ],
)
def test_parts_are_joined(
    device: torch.device, kind: str, heads: int, kv_heads: int, dim: int, value_dim: int, page: int, dtype: torch.dtype
) -> None:
    lengths = [length for _, length in CHUNKS]
    case = Case(heads, kv_heads, dim, page, device, dtype, lengths, value_dim=value_dim)
    how = variant(kind, heads, dim, device)
    if how.window:
        # The first part of a tile has keys that only some of its queries see, and its last queries see none of them.
        how = dataclasses.replace(how, window=150)
    starts = list(itertools.accumulate((count for count, _ in CHUNKS), initial=0))
    q = torch.randn(starts[-1], heads, dim, dtype=dtype, device=device)
    expected = case.expected(q, starts, how)
    for capacity in (6, 24):
        out = attend(case, q, starts, how, capacity)
        assert relative_error(out.cpu(), expected) < TOLERANCE[dtype], capacity


def test_parts_of_codes_are_joined(device: torch.device) -> None:
    case, how = Codes(2, 1, 64, 16, device, torch.bfloat16), variant("sinks", 2, 64, device)
    starts = [0, 1, 17, 47, 187]
    q = case.queries(starts[-1])
    case.check(attend(case, q, starts, how, 24), q, starts, how)


@pytest.mark.parametrize("least", [2, 4])
@pytest.mark.parametrize("window", [0, 5000])
def test_only_tiles_with_more_than_a_share_of_the_keys_are_cut(window: int, least: int) -> None:
    from baton_kernels.prefill_attention import prefill_tiles
    from baton_kernels.prefill_cuts import cut_tiles

    rng, capacity = random.Random(), 8
    for _ in range(300):
        chunks = [(rng.randint(0, 500), rng.choice([500, 3000, 100_000])) for _ in range(rng.randint(1, 5))]
        starts = list(itertools.accumulate((count for count, _ in chunks), initial=0))
        tiles = prefill_tiles(starts, 128)
        keys = []
        for at, row in zip(*tiles, strict=True):
            first, length = chunks[at][1] - starts[at + 1] + row, chunks[at][1]
            keys.append(len(range(max(first - window + 1, 0) if window else 0, min(first + 128, length))))
        plan = cut_tiles(tiles, starts, [length for _, length in chunks], 128, window, capacity, least)
        share = sum(keys) / capacity
        counts = [max(1, min(int(each / share), each // 64)) for each in keys]
        if plan is None:
            assert max(counts, default=1) < least
            continue
        assert max(counts) >= least
        sequences, rows, columns, joins = plan.columns
        part, parts, slots = (columns[at : at + len(rows)] for at in range(0, len(columns), len(rows)))
        assert sum(count for count in counts if count > 1) == plan.slots <= capacity
        found = list(zip(sequences, rows, part, parts, strict=True))
        wanted = list(zip(*tiles, counts, strict=True))
        assert found == [(at, row, index, count) for at, row, count in wanted for index in range(count)]
        assert [slot for slot, count in zip(slots, parts, strict=True) if count > 1] == list(range(plan.slots))
        assert [found[tile][:3] for tile in joins] == [(at, row, 0) for at, row, count in wanted if count > 1]
