"""Both attention kernels against a float64 softmax over each sequence's own tokens."""

import pytest
import torch

from baton_kernels.paged_attention import AttentionVariant

from .closeness import relative_error

LENGTHS = [1, 16, 77, 190]
VARIANTS = ["plain", "window", "softcap", "alibi", "all"]


def variant(kind: str, heads: int, dim: int, device: torch.device) -> AttentionVariant:
    return AttentionVariant(
        scale=dim**-0.5,
        window=20 if kind in ("window", "all") else 0,
        softcap=3.0 if kind in ("softcap", "all") else 0.0,
        alibi=torch.rand(heads, device=device) if kind in ("alibi", "all") else None,
    )


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, slope: float, how: AttentionVariant):
    """Attention of one query head at a position over keys [n, dim], in float64, written from the definition."""
    first = max(position + 1 - how.window, 0) if how.window else 0
    seen = range(first, position + 1)
    scores = torch.stack([q.double() @ k[key].double() * how.scale for key in seen])
    if how.softcap:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = scores - slope * torch.tensor([position - key for key in seen], dtype=torch.float64)
    return scores.softmax(0) @ v[first : position + 1].double()


class Case:
    """Sequences in shuffled blocks of a cache that is NaN wherever no sequence has a token."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, page: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.device = heads, kv_heads, dim, device
        most = -(-max(LENGTHS) // page)
        order = torch.randperm(most * len(LENGTHS) + 3)
        self.tables = order[: most * len(LENGTHS)].view(len(LENGTHS), most).int().to(device)
        shape = (len(order), page, kv_heads, dim)
        self.keys, self.values = (torch.full(shape, 1e4, dtype=dtype, device=device) for _ in range(2))
        self.tokens = []
        for table, length in zip(self.tables, LENGTHS, strict=True):
            k, v = (torch.randn(length, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
            for at in range(length):
                self.keys[table[at // page], at % page] = k[at]
                self.values[table[at // page], at % page] = v[at]
            self.tokens.append((k.cpu(), v.cpu()))
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)

    def expected(self, q: torch.Tensor, starts: list[int], how: AttentionVariant) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=torch.float64)
        for sequence, (k, v) in enumerate(self.tokens):
            first, end = starts[sequence], starts[sequence + 1]
            for row in range(first, end):
                for head in range(self.heads):
                    kv = head // (self.heads // self.kv_heads)
                    slope = float(how.alibi[head]) if how.alibi is not None else 0.0
                    position = len(k) - end + row
                    out[row, head] = naive(q[row, head].cpu(), k[:, kv], v[:, kv], position, slope, how)
        return out


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page"), [(4, 1, 64, 16), (6, 2, 80, 4), (2, 1, 64, 64)])
def test_decode(device: torch.device, kind: str, heads: int, kv_heads: int, dim: int, page: int) -> None:
    from baton_kernels.decode_attention import decode_attention

    case, how = Case(heads, kv_heads, dim, page, device), variant(kind, heads, dim, device)
    q = torch.randn(len(LENGTHS), heads, dim, device=device)
    expected = case.expected(q, list(range(len(LENGTHS) + 1)), how)
    rows = torch.arange(len(LENGTHS), device=device)
    for splits in (1, 3, 32):
        out = decode_attention(q, case.keys, case.values, case.tables, case.lengths, how, rows, splits)
        assert relative_error(out.cpu(), expected) < 1e-5, splits


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "dtype"),
    [
        (2, 1, 64, 16, torch.float32),
        (4, 4, 80, 4, torch.float32),
        # Blocks that the copy engine fetches whole; a head that leaves columns of its neighbour in the tile.
        (2, 2, 80, 64, torch.float16),
    ],
)
def test_prefill(
    device: torch.device, kind: str, heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype
) -> None:
    from baton_kernels.paged_attention import paged_attention_reference
    from baton_kernels.prefill_attention import prefill_attention, prefill_tiles, queries_per_tile

    case, how = Case(heads, kv_heads, dim, page, device, dtype), variant(kind, heads, dim, device)
    # A whole prompt of one token, a whole one, a chunk after a prefix, and a chunk longer than a tile.
    starts = [0, 1, 17, 47, 187]
    q = torch.randn(starts[-1], heads, dim, dtype=dtype, device=device)
    expected = case.expected(q, starts, how)
    where = torch.tensor(starts, dtype=torch.int32, device=device)
    queries = queries_per_tile(dim, q.element_size())
    sequences, rows = (torch.tensor(x, dtype=torch.int32, device=device) for x in prefill_tiles(starts, queries))
    out = prefill_attention(
        q, case.keys, case.values, case.tables, case.lengths, where, (sequences, rows), how, block_queries=queries
    )
    assert relative_error(out.cpu(), expected) < (1e-5 if dtype == torch.float32 else 2e-3)
    plain = paged_attention_reference(
        q.float(), case.keys.float(), case.values.float(), case.tables, case.lengths, where, how
    )
    assert relative_error(plain.cpu(), expected) < 1e-6


@pytest.mark.usefixtures("same_sum_anywhere")
@pytest.mark.parametrize(("page", "dtype"), [(16, torch.float32), (64, torch.float16)])
def test_a_uniform_result_does_not_depend_on_the_chunk(device: torch.device, page: int, dtype: torch.dtype) -> None:
    """The last tokens of each sequence, computed in one chunk and one by one, to the last bit."""
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
