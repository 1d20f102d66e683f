"""Entries that sum up windows of tokens, against each whole sequence in float64, and rotations of the ends of heads."""

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from baton_kernels.compression import compress
from baton_kernels.reference.compression import (
    Compression,
    compress_reference,
    keep_key_reference,
    turn_ends_reference,
    window_rows,
)
from baton_kernels.turned_ends import keep_key, turn_ends

from .test_short_conv import slots_of

OPS: dict[str, Any] = {"reference": compress_reference, "kernel": compress}
SHAPES = {
    "apart": Compression(dim=10, rate=8, overlaps=False, first=0, row=3, column=0),
    "few rows": Compression(dim=6, rate=6, overlaps=False, first=2, row=1, column=0),
    "overlapping": Compression(dim=10, rate=4, overlaps=True, first=0, row=1, column=0),
    "index keys": Compression(dim=6, rate=4, overlaps=True, first=60, row=3, column=6),
}
PAIRS, WIDTH, BLOCK, BLOCKS, EPS = 2, 12, 8, 40, 1e-6
LENGTHS = (45, 1, 22)


class Cache:
    """Blocks with states and with entries, which hold nothing, and block tables of three sequences for both."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.states = torch.full((BLOCKS, BLOCK, 1, 24), float("nan"), device=device)
        self.entries = torch.full((BLOCKS, BLOCK, 1, WIDTH), float("nan"), dtype=dtype, device=device)
        self.tables = torch.stack([torch.randperm(BLOCKS)[:24].view(3, 8) for _ in range(2)])

    def entry(self, shape: Compression, sequence: int, window: int) -> torch.Tensor:
        """Return an entry of a sequence."""
        position = shape.rate * (window + 1) - window_rows(shape.rate) + shape.row
        row = self.entries[self.tables[1, sequence, position // BLOCK], position % BLOCK, 0]
        return row[shape.column : shape.column + shape.dim]


def rotary(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(80, device=device)[:, None] * torch.tensor([0.7, 0.05], device=device)
    return angles.cos(), angles.sin()


def entries_of(
    whole: torch.Tensor, bias: torch.Tensor, norm: torch.Tensor, shape: Compression
) -> list[torch.Tensor]:  # fmt: skip
    """Return the entries of a sequence, computed in float64 from all tokens of each window at once."""
    vectors, gates = (each.unflatten(1, (shape.series, -1)).double() for each in whole.chunk(2, dim=1))
    gates = gates + bias.double().unflatten(1, (shape.series, -1))[torch.arange(len(whole)) % shape.rate]
    found = []
    for first in range(0, len(whole) - shape.rate + 1, shape.rate):
        own = slice(first, first + shape.rate)
        window, weights = vectors[own, -1], gates[own, -1]
        if shape.overlaps and first:
            before = slice(first - shape.rate, first)
            window, weights = (torch.cat([a, b[before, 0]]) for a, b in ((window, vectors), (weights, gates)))
        mean = (window * weights.softmax(dim=0)).sum(dim=0)
        normed = mean * torch.rsqrt(mean.square().mean() + EPS) * norm.double()
        end = torch.view_as_complex(normed[-2 * PAIRS :].view(-1, 2).contiguous())
        angle = first * torch.tensor([0.7, 0.05], dtype=torch.float64)
        turned = torch.view_as_real(end * torch.polar(torch.ones_like(angle), angle).to(end.device)).flatten()
        found.append(torch.cat([normed[: -2 * PAIRS], turned]))
    return found


def run(op: str, shape: Compression, cache: Cache, wholes: list[torch.Tensor], weights: Any, steps: Any) -> None:
    """Compute steps, each of which has some sequences with the end of the chunk, and two tokens of none."""
    done = [0] * len(wholes)
    device = wholes[0].device
    for ends in steps:
        chunks = [(number, done[number], end) for number, end in ends.items() if end > done[number]]
        if not chunks:
            continue
        rows = torch.cat([wholes[number][first:end] for number, first, end in chunks])
        rows = torch.cat([rows, rows.new_full((2, rows.shape[1]), float("nan"))])
        positions = torch.cat([torch.arange(first, end) for _, first, end in chunks])
        both = [
            torch.cat([slots_of(table[number], first, end, 2, BLOCK) for number, first, end in chunks], dim=1)
            for table in cache.tables
        ]
        slots, entry_slots = (functional.pad(each, (0, 2), value=-1).to(device) for each in both)
        positions = functional.pad(positions, (0, 2)).to(device)
        OPS[op](
            rows, *weights, EPS, rotary(device), positions, slots, entry_slots[0], cache.states, cache.entries, shape
        )
        for number, _, end in chunks:
            done[number] = end


def make(shape: Compression, device: torch.device) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    width = shape.series * shape.dim
    wholes = [torch.randn(length, 2 * width, device=device) * 2 for length in LENGTHS]
    return wholes, (torch.randn(shape.rate, width, device=device), torch.rand(shape.dim, device=device) + 0.5)


def some_steps() -> list[dict[int, int]]:
    """Return steps that compute all sequences in chunks of several sizes, one token at a time among them."""
    steps, done = [], dict.fromkeys(range(3), 0)
    while any(done[number] < length for number, length in enumerate(LENGTHS)):
        sizes = {number: random.choice((0, 1, 1, 3, 9, 20)) for number in done}
        done = {number: min(done[number] + sizes[number], LENGTHS[number]) for number in done}
        if any(sizes.values()):
            steps.append(dict(done))
    return steps


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_give_the_entries_of_each_whole_sequence(op: str, name: str, device: torch.device) -> None:
    shape, cache = SHAPES[name], Cache(torch.float32, device)
    wholes, weights = make(shape, device)
    expected = [entries_of(whole, *weights, shape) for whole in wholes]
    run(op, shape, cache, wholes, weights, some_steps())
    for number, entries in enumerate(expected):
        for window, entry in enumerate(entries):
            torch.testing.assert_close(cache.entry(shape, number, window).double(), entry, rtol=2e-4, atol=1e-5)
    written = int(cache.entries.isfinite().sum())
    assert written == shape.dim * sum(map(len, expected))
    # A sequence with the same beginning goes on from a complete block, whose state nobody has changed since.
    again = Cache(torch.float32, device)
    again.states, again.tables = cache.states, cache.tables.clone()
    again.tables[0, 0, 3:5] = torch.tensor([block for block in range(BLOCKS) if block not in cache.tables[0]])[:2]
    states = cache.states.clone()
    slots, entry_slots = (slots_of(table[0], 24, 40, 2, BLOCK).to(device) for table in again.tables)
    positions = torch.arange(24, 40, device=device)
    OPS[op](
        wholes[0][24:40], *weights, EPS, rotary(device), positions, slots, entry_slots[0], again.states, again.entries,
        shape,
    )  # fmt: skip
    for window in range(24 // shape.rate, 40 // shape.rate):
        torch.testing.assert_close(again.entry(shape, 0, window), cache.entry(shape, 0, window), rtol=1e-4, atol=1e-5)
    kept = cache.tables[0].flatten()
    assert torch.equal(states[kept].nan_to_num(7.0), again.states[kept].nan_to_num(7.0))


@pytest.mark.parametrize("name", ["few rows", "overlapping"])
def test_entries_and_states_do_not_depend_on_the_division_into_steps(name: str, device: torch.device) -> None:
    shape, caches = SHAPES[name], [Cache(torch.bfloat16, device) for _ in range(2)]
    wholes, weights = make(shape, device)
    wholes = [whole.bfloat16() for whole in wholes]
    for cache, steps in zip(caches, ([dict(enumerate(LENGTHS))], some_steps()), strict=True):
        cache.tables = caches[0].tables
        run("kernel", shape, cache, wholes, weights, steps)
    assert torch.equal(caches[0].entries.nan_to_num(7.0), caches[1].entries.nan_to_num(7.0))
    assert torch.equal(caches[0].states.nan_to_num(7.0), caches[1].states.nan_to_num(7.0))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("name", "bad"), [("apart", float("-inf")), ("overlapping", float("nan"))])
def test_numbers_that_are_not_finite_stay_in_their_sequence(
    op: str, name: str, bad: float, device: torch.device
) -> None:
    shape, (plain, spoilt) = SHAPES[name], [Cache(torch.float32, device) for _ in range(2)]
    wholes, weights = make(shape, device)
    spoilt.tables, steps = plain.tables, some_steps()
    run(op, shape, plain, wholes, weights, steps)
    wholes[0][12:18] = bad
    run(op, shape, spoilt, wholes, weights, steps)
    for kind in (0, 1):
        for table in plain.tables[kind, 1:]:
            for one, other in ((plain.states, spoilt.states), (plain.entries, spoilt.entries)):
                if kind == (one is plain.entries):
                    assert torch.equal(one[table].nan_to_num(7.0), other[table].nan_to_num(7.0))
    # The windows before and long after are those of a sequence without such numbers.
    for window in (0, 32 // shape.rate):
        assert torch.equal(spoilt.entry(shape, 0, window), plain.entry(shape, 0, window))
    assert not spoilt.entry(shape, 0, 16 // shape.rate).isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "eps", "back"), [(3, 1e-6, False), (16, None, True), (1, None, False)])
def test_ends_are_turned_as_in_the_reference(
    dtype: torch.dtype, heads: int, eps: float | None, back: bool, device: torch.device
) -> None:
    x = torch.randn(5, heads, 24, device=device).to(dtype)
    positions = torch.tensor([0, 79, 5, 5, 33], device=device)
    result = turn_ends(x, rotary(device), positions, back=back, eps=eps)
    expected = turn_ends_reference(x, rotary(device), positions, back=back, eps=eps)
    # The interpreter rounds results towards 0.
    torch.testing.assert_close(result, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    if eps is None:
        there = turn_ends(x, rotary(device), positions, back=not back)
        torch.testing.assert_close(turn_ends(there, rotary(device), positions, back=back), x, rtol=3e-2, atol=3e-2)


def test_keys_are_normed_turned_and_kept(device: torch.device) -> None:
    kv, norm = torch.randn(4, 30, device=device)[:, 6:], torch.rand(24, device=device)
    kv[2] = float("nan")
    positions, slots = torch.tensor([3, 4, 0, 70], device=device), torch.tensor([9, 2, -1, 14], device=device)
    caches = [torch.full((2, 8, 1, 24), 7.0, device=device) for _ in range(2)]
    keep_key(kv, norm, EPS, rotary(device), positions, slots, caches[0])
    keep_key_reference(kv, norm, EPS, rotary(device), positions, slots, caches[1])
    torch.testing.assert_close(*caches)
    assert int((caches[0].flatten(0, 2) != 7.0).any(dim=1).sum()) == 3
    expected = torch.rsqrt(kv[1].double().square().mean() + EPS) * kv[1].double() * norm.double()
    torch.testing.assert_close(caches[0][0, 2, 0, :20].double(), expected[:20], rtol=1e-5, atol=1e-6)
