"""Both attention kernels against a float64 softmax over each sequence's own tokens."""

import dataclasses
import sys

import pytest
import torch

from baton_kernels.reference.paged_attention import AttentionVariant

from .closeness import relative_error

LENGTHS = [1, 16, 77, 190]
VARIANTS = ["plain", "window", "chunks", "softcap", "alibi", "rounded alibi", "sinks", "all"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def variant(kind: str, heads: int, dim: int, device: torch.device) -> AttentionVariant:
    return AttentionVariant(
        scale=dim**-0.5,
        window=20 if kind in ("window", "chunks", "all") else 0,
        softcap=3.0 if kind in ("softcap", "all") else 0.0,
        alibi=torch.rand(heads, device=device) if kind in ("alibi", "rounded alibi", "all") else None,
        # Some outweigh all keys, and some change little.
        sinks=2 * torch.randn(heads, device=device) if kind in ("sinks", "all") else None,
        chunked=kind == "chunks",
        rounded_alibi=kind == "rounded alibi",
    )


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: AttentionVariant) -> torch.Tensor:
    """Attention of a sequence's last queries [n, heads, dim] over all its keys [t, kv_heads, dim], in float64."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    positions = torch.arange(len(k) - len(q), len(k))[:, None]
    ages = positions - torch.arange(len(k))[None, :]
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * how.scale
    if how.softcap:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if how.alibi is not None and how.rounded_alibi:
        products = how.alibi.cpu()[:, None, None] * torch.arange(len(k)).bfloat16().float()
        scores = scores + how.scale * products.bfloat16().double()
    elif how.alibi is not None:
        scores = scores - how.alibi.cpu().double()[:, None, None] * ages
    seen = (ages >= 0) & (ages < how.window) if how.window else ages >= 0
    if how.chunked:
        seen = (ages >= 0) & (torch.arange(len(k)) // how.window == positions // how.window)
    scores[:, ~seen] = float("-inf")
    if how.sinks is not None:
        sinks = how.sinks.cpu().double()[:, None, None].expand(-1, len(q), 1)
        return (torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ values).transpose(0, 1)
    return (scores.softmax(-1) @ values).transpose(0, 1)


class Case:
    """Sequences in shuffled blocks of a cache that is NaN wherever no sequence has a token."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        page: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        lengths: list[int] = LENGTHS,
        apart: int = 0,
        value_dim: int | None = None,
    ) -> None:
        """apart: unused elements between heads of the cache. value_dim: None = dim."""
        self.heads, self.kv_heads, self.dim, self.device = heads, kv_heads, dim, device
        self.value_dim = value_dim or dim
        dims = dim, self.value_dim
        most = -(-max(lengths) // page)
        order = torch.randperm(most * len(lengths) + 3)
        self.tables = order[: most * len(lengths)].view(len(lengths), most).int().to(device)
        shape = (len(order), page, kv_heads)
        self.keys, self.values = (
            torch.full((*shape, size + apart), float("nan"), dtype=dtype, device=device)[..., :size] for size in dims
        )
        self.tokens = []
        for table, length in zip(self.tables, lengths, strict=True):
            k, v = (torch.randn(length, kv_heads, size, dtype=dtype, device=device) for size in dims)
            for at in range(length):
                self.keys[table[at // page], at % page] = k[at]
                self.values[table[at // page], at % page] = v[at]
            self.tokens.append((k.cpu(), v.cpu()))
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)

    def expected(self, q: torch.Tensor, starts: list[int], how: AttentionVariant) -> torch.Tensor:
        chunks = [
            naive(q[first:end].cpu(), k, v, how)
            for (k, v), first, end in zip(self.tokens, starts, starts[1:], strict=False)
        ]
        return torch.cat(chunks)


def check_decode(case: "Case", kind: str, capacities: tuple[int, ...]) -> None:
    """Compare decode attention with the definition. capacities: about how many parts all sequences are cut into."""
    from baton_kernels.decode_attention import SEPARATE_JOIN_SEQUENCES, decode_attention
    from baton_kernels.decode_parts import plan_parts

    device, dtype, count = case.device, case.keys.dtype, len(LENGTHS)
    how = variant(kind, case.heads, case.dim, device)
    rows = torch.randperm(count, device=device)
    tables = torch.empty_like(case.tables)
    tables[rows] = case.tables
    # A small batch, whose parts a second kernel joins, and a larger one, in which the decode kernel joins them.
    for copies in (1, SEPARATE_JOIN_SEQUENCES // count + 1):
        # The last sequence has no tokens, and so no result.
        q = torch.randn(copies * count + 1, case.heads, case.dim, dtype=dtype, device=device)
        expected = [case.expected(some, list(range(count + 1)), how) for some in q[:-1].split(count)]
        lengths, of_rows = (torch.cat([part.repeat(copies), part.new_zeros(1)]) for part in (case.lengths, rows))
        arrivals = torch.zeros(len(q) * case.kv_heads, dtype=torch.int32, device=device)
        for capacity in capacities:
            parts = plan_parts(lengths, of_rows, capacity, arrivals)
            out = q.new_full((*q.shape[:2], case.value_dim), 7.0)
            decode_attention(q, case.keys, case.values, tables, how, parts, out)
            assert relative_error(out[:-1].cpu(), torch.cat(expected)) < TOLERANCE[dtype], (copies, capacity)
            assert (out[-1] == 7.0).all(), (copies, capacity)
            assert not arrivals.any(), (copies, capacity)


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page"), [(4, 1, 64, 16), (6, 2, 80, 4), (2, 1, 64, 64)])
def test_decode(device: torch.device, kind: str, heads: int, kv_heads: int, dim: int, page: int) -> None:
    check_decode(Case(heads, kv_heads, dim, page, device), kind, (1, 3, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [96, 128, 192, 256, 512])
def test_decode_of_wide_heads(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    check_decode(Case(2, 1, dim, 64, device, dtype), "plain", (1, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [16, 24, 512])
def test_decode_of_heads_that_lie_apart(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    check_decode(Case(4, 2, dim, 64, device, dtype, apart=16), "plain", (1, 8))


# Keys and values of MiMo-V2-Flash in layers of two kinds, and values that are larger than keys.
VALUES_OF_OTHER_SIZES = [
    ("sinks", 4, 2, 192, 128, 0, 64), ("plain", 4, 1, 192, 128, 192, 64), ("all", 6, 2, 24, 80, 0, 4),
    ("window", 4, 2, 48, 36, 8, 16),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kind", "heads", "kv_heads", "dim", "value_dim", "apart", "page"), VALUES_OF_OTHER_SIZES)
def test_decode_of_values_of_another_size(
    device: torch.device, kind: str, heads: int, kv_heads: int, dim: int, value_dim: int, apart: int, page: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    case = Case(heads, kv_heads, dim, page, device, dtype, apart=apart, value_dim=value_dim)
    check_decode(case, kind, (1, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kind", "heads", "kv_heads", "dim", "value_dim", "apart", "page"), VALUES_OF_OTHER_SIZES)
def test_prefill_of_values_of_another_size(
    device: torch.device, kind: str, heads: int, kv_heads: int, dim: int, value_dim: int, apart: int, page: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    check_prefill(Case(heads, kv_heads, dim, page, device, dtype, apart=apart, value_dim=value_dim), kind)


@pytest.mark.parametrize("capacity", [1, 3, 64])
@pytest.mark.parametrize("count", [1, 32, 33, 1500])
def test_parts_share_the_work(device: torch.device, count: int, capacity: int) -> None:
    from baton_kernels.decode_parts import CLASSES, FEW_SEQUENCES, PARTS, SEQUENCE, plan_parts
    from baton_kernels.reference.decode_parts import parts_reference

    lengths = torch.randint(0, 3000, (count,), dtype=torch.int32)
    lengths[count // 3] = 0
    lengths[count // 2] = 100_000
    arrivals = torch.zeros(count, dtype=torch.int32, device=device)
    rows = torch.randperm(count)
    parts = plan_parts(lengths.to(device), rows.to(device), capacity, arrivals)
    plan, classes = parts.plan.cpu(), CLASSES if count > FEW_SEQUENCES else 1
    expected = parts_reference(lengths.tolist(), rows.tolist(), capacity, 64, classes)
    assert plan.T[: len(expected)].tolist() == expected
    assert (plan[SEQUENCE, len(expected) :] == -1).all()
    for sequence, (first, count_of) in enumerate(parts.spans.cpu().T.tolist()):
        assert (plan[SEQUENCE, first : first + count_of] == sequence).all()
        assert count_of == sum(part[SEQUENCE] == sequence for part in expected)
    share = -(-sum(-(-length // 64) for length in lengths.tolist()) // capacity)
    tiles = -(-lengths[plan[SEQUENCE, : len(expected)].long()] // 64)
    each = -(-tiles // plan[PARTS, : len(expected)])
    assert each.max() <= share, "no part is more than its share"
    assert classes == 1 or (each[1:] <= each[:-1] + share / classes).all(), "the longest parts come first"


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "dtype"),
    [
        (2, 1, 64, 16, torch.float32),
        (4, 4, 80, 4, torch.float32),
        # The copy engine fetches whole blocks, and the tile has columns of the next head.
        (2, 2, 80, 64, torch.float16),
    ],
)
def test_prefill(
    device: torch.device, kind: str, heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype
) -> None:
    check_prefill(Case(heads, kv_heads, dim, page, device, dtype), kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [96, 128, 192, 256, 512])
def test_prefill_of_wide_heads(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    check_prefill(Case(2, 1, dim, 64, device, dtype), "window")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [16, 24, 512])
def test_prefill_of_heads_that_lie_apart(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    check_prefill(Case(4, 2, dim, 64, device, dtype, apart=16), "plain")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("window", [64, 150, 200, 192])
@pytest.mark.parametrize(("page", "queries", "dtype"), [(16, 64, torch.float32), (64, 128, torch.float16)])
def test_prefill_of_windows_with_whole_tiles_inside(
    device: torch.device, page: int, queries: int, dtype: torch.dtype, window: int, uniform: bool, chunked: bool
) -> None:
    """Keys that all queries of a tile see lie between those that some see no longer, and those that some do not yet."""
    from baton_kernels.prefill_attention import prefill_attention, prefill_tiles

    lengths = [300, 447]
    case = Case(2, 1, 16, page, device, dtype, lengths)
    starts = [0, 290, 440]
    # What has left the window of all queries may be lost.
    for table, length, new in zip(case.tables, lengths, (290, 150), strict=True):
        for at in range(max(length - new - window + 1, 0)):
            case.keys[table[at // page], at % page] = case.values[table[at // page], at % page] = float("nan")
    how = dataclasses.replace(variant("plain", 2, 16, device), window=window, chunked=chunked)
    q = torch.randn(starts[-1], 2, 16, dtype=dtype, device=device)
    where, *tiles = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, *prefill_tiles(starts, queries))
    )
    out = prefill_attention(
        q, case.keys, case.values, case.tables, case.lengths, where, (tiles[0], tiles[1]), how,
        block_queries=queries, uniform=uniform,
    )  # fmt: skip
    assert relative_error(out.cpu(), case.expected(q, starts, how)) < TOLERANCE[dtype]


def check_prefill(case: "Case", kind: str) -> None:
    """Compare prefill attention and its reference with the definition."""
    from baton_kernels.prefill_attention import prefill_attention, prefill_tiles, queries_per_tile
    from baton_kernels.reference.paged_attention import paged_attention_reference

    device, dtype, dim = case.device, case.keys.dtype, case.dim
    how = variant(kind, case.heads, dim, device)
    # A whole prompt of one token, a whole one, a chunk after a prefix, and a chunk longer than a tile.
    starts = [0, 1, 17, 47, 187]
    q = torch.randn(starts[-1], case.heads, dim, dtype=dtype, device=device)
    expected = case.expected(q, starts, how)
    where = torch.tensor(starts, dtype=torch.int32, device=device)
    queries = queries_per_tile(max(dim, case.value_dim), q.element_size(), shared_memory=sys.maxsize)
    sequences, rows = (torch.tensor(x, dtype=torch.int32, device=device) for x in prefill_tiles(starts, queries))
    out = prefill_attention(
        q, case.keys, case.values, case.tables, case.lengths, where, (sequences, rows), how, block_queries=queries
    )
    assert relative_error(out.cpu(), expected) < TOLERANCE[dtype]
    # A graph always has the same number of tiles; those that a step does not need belong to a sequence without tokens.
    count, end = len(LENGTHS), starts[-1]
    spare = [
        torch.cat([x, x.new_tensor([value] * 2)])
        for x, value in ((case.lengths, 0), (where, end), (sequences, count), (rows, end))
    ]
    tables = torch.cat([case.tables, case.tables[:1]])
    padded = q.new_full((len(q) + 3, case.heads, case.value_dim), 7.0)
    prefill_attention(
        torch.cat([q, q[:3]]), case.keys, case.values, tables, spare[0], spare[1], (spare[2], spare[3]), how, padded,
        block_queries=queries,
    )  # fmt: skip
    assert torch.equal(padded[:end], out)
    assert (padded[end:] == 7.0).all()
    plain = paged_attention_reference(
        q.float(), case.keys.float(), case.values.float(), case.tables, case.lengths, where, how
    )
    assert relative_error(plain.cpu(), expected) < 1e-6


@pytest.mark.usefixtures("same_sum_anywhere")
@pytest.mark.parametrize(("page", "dtype"), [(16, torch.float32), (64, torch.float16)])
def test_a_uniform_result_does_not_depend_on_the_chunk(device: torch.device, page: int, dtype: torch.dtype) -> None:
    """The last tokens of each sequence have the same bits whether they are computed in one chunk or one by one."""
    from baton_kernels.prefill_attention import prefill_attention, prefill_tiles

    case, how = Case(2, 1, 64, page, device, dtype), variant("plain", 2, 64, device)

    def attend(q: torch.Tensor, lengths: torch.Tensor, starts: list[int]) -> torch.Tensor:
        where, *tiles = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, *prefill_tiles(starts, 64))
        )
        return prefill_attention(
            q, case.keys, case.values, case.tables, lengths, where, (tiles[0], tiles[1]), how, uniform=True
        )

    starts = [0, 1, 11, 81, 191]
    together = torch.randn(starts[-1], 2, 64, dtype=dtype, device=device)
    out = attend(together, case.lengths, starts)
    for back in (0, 3):
        lengths = torch.tensor([length - min(back, length - 1) for length in LENGTHS], dtype=torch.int32, device=device)
        rows = [end - 1 - min(back, length - 1) for end, length in zip(starts[1:], LENGTHS, strict=True)]
        alone = attend(together[rows].contiguous(), lengths, list(range(len(LENGTHS) + 1)))
        assert torch.equal(alone, out[rows])
