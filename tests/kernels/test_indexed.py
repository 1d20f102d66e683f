"""The kernels of an indexer and their references against the definition in float64, over caches that hold NaN beside
the tokens."""

import pytest
import torch

from baton_kernels.reference.indexed import (
    LARGEST_SCORE,
    index_rope_and_cache_reference,
    index_scores_reference,
    selection_reference,
)

from .closeness import poisoned, relative_error

LENGTHS = [1, 70, 16, 190]


class Case:
    """Index keys of sequences in shuffled blocks of a cache that is NaN wherever no sequence has a token."""

    def __init__(self, heads: int, dim: int, page: int, device: torch.device, dtype: torch.dtype) -> None:
        most = -(-max(LENGTHS) // page)
        order = torch.randperm(most * len(LENGTHS) + 3)
        self.tables = order[: most * len(LENGTHS)].view(len(LENGTHS), most).int().to(device)
        self.cache = torch.full((len(order), page, 1, dim), float("nan"), dtype=dtype, device=device)
        self.keys = [torch.randn(length, dim).to(dtype).to(device) for length in LENGTHS]
        for table, keys in zip(self.tables.tolist(), self.keys, strict=True):
            for at, key in enumerate(keys):
                self.cache[table[at // page], at % page, 0] = key
        self.heads, self.dim, self.page, self.device, self.dtype = heads, dim, page, device, dtype

    def queries(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.randn(count, self.heads, self.dim, device=self.device).to(self.dtype)
        return q, torch.randn(count, self.heads, device=self.device)

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _close(scores: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> bool:
    # Large terms may cancel each other in a score, but rounding errors grow with the sum of the terms' sizes.
    return bool(((scores.double() - expected).abs() < 1e-6 * sizes).all())


@pytest.mark.parametrize(("heads", "dim", "page"), [(20, 24, 16), (4, 6, 5), (64, 128, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 4])
def test_scores(device: torch.device, dtype: torch.dtype, heads: int, dim: int, page: int, tokens: int) -> None:
    """Of one query of each sequence, in rows of a larger tensor, or of the last ones of each."""
    from baton_kernels.decode_parts import plan_parts
    from baton_kernels.index_scores import index_scores

    c = Case(heads, dim, page, device, dtype)
    starts = [0, 1, 7, 18, 19] if tokens > 1 else [0, 1, 2, 3, 4]
    firsts, lengths, rows = [0], [], []
    for sequence, length in enumerate(LENGTHS):
        for first in range(starts[sequence], starts[sequence + 1], tokens):
            firsts.append(min(first + tokens, starts[sequence + 1]))
            lengths.append(length - starts[sequence + 1] + firsts[-1])
            rows.append(sequence)
    where = torch.tensor(rows, device=device)
    q, weights = c.queries(starts[-1])
    for capacity in (1, 5):
        parts = plan_parts(c.ints(lengths), where, capacity, c.ints([]))
        given = (tokens, c.ints(firsts)) if tokens > 1 else ()
        scores = index_scores(q, weights, c.cache, c.tables, parts, max(LENGTHS) + 3, *given)
        for sequence, keys in enumerate(c.keys):
            mine = slice(starts[sequence], starts[sequence + 1])
            products = torch.einsum("thd,kd->thk", q[mine].double(), keys.double()).relu()
            expected = (products * weights[mine, :, None].double()).sum(1)
            sizes = torch.einsum("thd,kd->thk", q[mine].double().abs(), keys.double().abs())
            sizes = (sizes * weights[mine, :, None].double().abs()).sum(1)
            plain = index_scores_reference(q[mine], weights[mine], keys)
            assert _close(plain, expected, sizes)
            for at, row in enumerate(range(mine.start, mine.stop)):
                seen = len(keys) - (mine.stop - row) + 1
                assert _close(scores[row, :seen], expected[at, :seen], sizes[at, :seen]), (sequence, at)


def test_scores_that_are_no_numbers_have_an_order(device: torch.device) -> None:
    from baton_kernels.decode_parts import plan_parts
    from baton_kernels.index_scores import index_scores

    c = Case(2, 16, 16, device, torch.float32)
    q, weights = c.queries(1)
    weights[0, 0] = float("inf")
    q[0, 1, 0], weights[0, 1] = float("inf"), -1.0
    parts = plan_parts(c.ints([70]), torch.tensor([1], device=device), 2, c.ints([]))
    ours = index_scores(q, weights, c.cache, c.tables, parts, 70)
    for scores in (ours, index_scores_reference(q, weights, c.keys[1])):
        assert scores.isfinite().all()
        assert scores.abs().max() == torch.tensor(LARGEST_SCORE)


def _selected(scores: list[float], most: int) -> list[int]:
    """Return the positions that are selected, by their definition."""
    return sorted(sorted(range(len(scores)), key=lambda at: -scores[at])[:most])


@pytest.mark.parametrize("kind", ["random", "few values", "one value", "zeros and a few", "wide"])
@pytest.mark.parametrize("most", [1, 8, 64, 200])
def test_the_highest_scores_are_selected(device: torch.device, kind: str, most: int) -> None:
    """Also with many equal scores, of which the first are selected, and across tiles."""
    from baton_kernels.index_scores import select_slots

    page, lengths, width = 16, [1, 8, 9, 64, 65, 1500, 3, 4200], 4300
    random = torch.randn(len(lengths), width, device=device)
    scores = {
        "random": random,
        "few values": random.round(),
        "one value": torch.full_like(random, -2.5),
        "zeros and a few": random.clamp(min=2.5) - 2.5,
        "wide": random * 10.0 ** (random * 8),
    }[kind]
    for line, length in zip(scores, lengths, strict=True):
        line[length:] = float("nan")
    tables = torch.randperm(len(lengths) * 270, device=device).view(len(lengths), 270).int()
    rows = torch.randperm(len(lengths), device=device)
    count = torch.tensor(lengths, dtype=torch.int32, device=device)
    slots = select_slots(scores, count, rows, tables, page, most)
    assert slots.shape == (len(lengths), most)
    for own, line, length, row in zip(slots.tolist(), scores, lengths, rows.tolist(), strict=True):
        expected = _selected(line[:length].tolist(), most)
        table = tables[row].tolist()
        assert own[: len(expected)] == [table[at // page] * page + at % page for at in expected]
        seen = torch.arange(width, device=device) < length
        plain = selection_reference(line.nan_to_num(0.0), seen, most)
        assert plain.nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "rope"), [(20, 24, 16), (3, 12, 12), (16, 128, 64), (2, 10, 6), (3, 12, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rope_and_cache(
    device: torch.device, dtype: torch.dtype, interleaved: bool, heads: int, dim: int, rope: int
) -> None:
    from baton_kernels.index_inputs import index_rope_and_cache

    tokens, half = 7, rope // 2
    q, k = (torch.randn(tokens, size, device=device).to(dtype) for size in (heads * dim, dim))
    weight, bias = (torch.randn(dim, device=device).to(dtype) for _ in range(2))
    angles = torch.rand(50, half, device=device) * 6
    positions, slots = torch.randint(0, 50, (tokens,), device=device), torch.randperm(40, device=device)[:tokens]
    slots[3] = -1
    turns = torch.polar(torch.ones(50, half, dtype=torch.float64), angles.double().cpu())[positions.cpu()]

    def turned(x: torch.Tensor) -> torch.Tensor:
        begin, rest = x.double().cpu().split([rope, dim - rope], dim=-1)
        pairs = torch.stack([begin[..., 0::2], begin[..., 1::2]] if interleaved else list(begin.chunk(2, -1)), dim=-1)
        after = torch.view_as_complex(pairs.contiguous()) * turns.view(tokens, *[1] * (x.dim() - 2), half)
        return torch.cat([after.real, after.imag, rest], dim=-1)

    wide = k.double()
    normed = (wide - wide.mean(1, keepdim=True)) / (wide.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    keys = turned(normed * weight + bias)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    for operation in (index_rope_and_cache, index_rope_and_cache_reference):
        cache = poisoned(5, 8, 1, dim, like=q)
        rotary = angles.cos(), angles.sin()
        out = operation(q, k, weight, bias, 1e-5, rotary, interleaved, positions, slots, cache, heads)
        assert relative_error(out.cpu(), turned(q.view(tokens, heads, dim))) < tolerance
        kept = slots >= 0
        written = cache.flatten(0, 2)
        assert relative_error(written[slots[kept]].cpu(), keys[kept.cpu()]) < tolerance
        rest = torch.ones(40, dtype=torch.bool, device=device)
        rest[slots[kept]] = False
        assert written[rest].isnan().all()
