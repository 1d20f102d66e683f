"""The prefill kernel for Hopper against a float64 softmax where there is such a GPU. Elsewhere it is compiled, as no
interpreter runs it."""

import dataclasses
import itertools

import pytest
import torch

from .closeness import poisoned, relative_error
from .hopper import compiled_sizes, on_hopper
from .test_attention import Case, variant

# New tokens and all tokens of each sequence.
CHUNKS = [(1, 1), (200, 200), (130, 1000), (60, 700), (300, 333)]


@on_hopper
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (3, 3, 96), (4, 1, 128), (2, 1, 256)])
def test_results_are_those_of_the_definition(heads: int, kv_heads: int, dim: int) -> None:
    for kind, window in itertools.product(("plain", "softcap", "sinks"), (0, 20, 150, 600)):
        for chunked in (False, True) if window else (False,):
            check(heads, kv_heads, dim, kind, window, chunked)


def check(heads: int, kv_heads: int, dim: int, kind: str, window: int, chunked: bool) -> None:
    from baton_kernels.hopper_prefill import BLOCK_QUERIES, hopper_prefill
    from baton_kernels.prefill_attention import prefill_tiles

    device = torch.device("cuda")
    case = Case(heads, kv_heads, dim, 64, device, torch.float16, [length for _, length in CHUNKS])
    how = dataclasses.replace(variant(kind, heads, dim, device), window=window, chunked=chunked)
    starts = [sum(count for count, _ in CHUNKS[:index]) for index in range(len(CHUNKS) + 1)]
    q = torch.randn(starts[-1], heads, dim, dtype=torch.float16, device=device)
    where, *tiles = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, *prefill_tiles(starts, BLOCK_QUERIES))
    )
    # What has left the window of all queries may be lost.
    for table, (new, length) in zip(case.tables, CHUNKS, strict=True):
        for at in range(max(length - new - window + 1, 0) if window else 0):
            case.keys[table[at // 64], at % 64] = case.values[table[at // 64], at % 64] = float("nan")
    facts = case.tables, case.lengths, where, (tiles[0], tiles[1])
    out = hopper_prefill(q, case.keys, case.values, *facts, how, poisoned(*q.shape, like=q))
    assert relative_error(out.cpu(), case.expected(q, starts, how)) < 2e-3, (kind, window, chunked)


@pytest.mark.processes
def test_it_compiles_for_each_kind_of_tile() -> None:
    sizes = compiled_sizes("prefill")
    assert len(sizes) == 3
    assert min(sizes) > 10_000
