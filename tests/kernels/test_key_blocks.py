"""The kernels that select blocks of keys and their references against the definition in float64, over caches that hold
NaN beside the tokens."""

import pytest
import torch

from baton_kernels.reference.indexed import LARGEST_SCORE
from baton_kernels.reference.key_blocks import key_block_scores_reference, key_block_selection_reference

from .closeness import relative_error

# Within the first block, at the end of a block and of a page, just behind them, and long.
LENGTHS = [1, 7, 8, 9, 40, 70, 16, 190]


class Case:
    """Index keys of sequences in shuffled blocks of a cache that is NaN wherever no sequence has a token. Index keys,
    keys and values have the same size."""

    def __init__(self, heads: int, dim: int, page: int, device: torch.device, dtype: torch.dtype) -> None:
        most = -(-max(LENGTHS) // page)
        order = torch.randperm(most * len(LENGTHS) + 3)
        self.tables = order[: most * len(LENGTHS)].view(len(LENGTHS), most).int().to(device)
        self.cache = torch.full((3, len(order), page, heads, dim), float("nan"), dtype=dtype, device=device)
        self.planes = [torch.randn(3, length, heads, dim).to(dtype).to(device) for length in LENGTHS]
        for table, planes in zip(self.tables.tolist(), self.planes, strict=True):
            planes[0] = planes[0, :, :1]
            for at in range(planes.shape[1]):
                self.cache[:, table[at // page], at % page] = planes[:, at]
        self.heads, self.dim, self.page, self.device, self.dtype = heads, dim, page, device, dtype

    @property
    def index_keys(self) -> list[torch.Tensor]:
        """The index keys of each sequence, [K, dim]."""
        return [planes[0, :, 0] for planes in self.planes]

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _expected(q: torch.Tensor, keys: torch.Tensor, length: int, size: int, local: int) -> torch.Tensor:
    """Return the scores of blocks for one query [heads, dim] that sees `length` keys, [heads, blocks], by their
    definition."""
    products = q.double() @ keys[:length].double().T
    scores = torch.stack([part.amax(dim=1) for part in products.split(size, dim=1)], dim=1)
    scores[:, max(scores.shape[1] - local, 0) :] = float("inf")
    return scores


@pytest.mark.parametrize(("heads", "dim", "page"), [(4, 24, 16), (1, 6, 5), (3, 128, 64)])
@pytest.mark.parametrize(("size", "local"), [(8, 1), (24, 2), (128, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 4])
def test_scores(
    device: torch.device, dtype: torch.dtype, heads: int, dim: int, page: int, size: int, local: int, tokens: int
) -> None:
    """Of one query of each sequence, or of the last ones of each, which form groups."""
    from baton_kernels.decode_parts import plan_parts
    from baton_kernels.key_blocks import key_block_scores

    c = Case(heads, dim, page, device, dtype)
    counts = [1, 5, 1, 9, 11, 1, 2, 6] if tokens > 1 else [1] * len(LENGTHS)
    starts = [sum(counts[:at]) for at in range(len(counts) + 1)]
    firsts, lengths, rows = [0], [], []
    for sequence, length in enumerate(LENGTHS):
        for first in range(starts[sequence], starts[sequence + 1], tokens):
            firsts.append(min(first + tokens, starts[sequence + 1]))
            lengths.append(length - starts[sequence + 1] + firsts[-1])
            rows.append(sequence)
    where = torch.tensor(rows, device=device)
    q = torch.randn(starts[-1], heads, dim, device=device).to(dtype)
    blocks = -(-max(LENGTHS) // size)
    for capacity in (1, 13):
        parts = plan_parts(c.ints(lengths), where, capacity, c.ints([]))
        given = (tokens, c.ints(firsts)) if tokens > 1 else ()
        scores = key_block_scores(q, c.cache[0], c.tables, parts, blocks + 3, size, local, *given)
        for sequence, keys in enumerate(c.index_keys):
            mine = slice(starts[sequence], starts[sequence + 1])
            known = torch.arange(len(keys), device=device)
            seen = known <= torch.arange(len(keys) - counts[sequence], len(keys), device=device)[:, None]
            plain = key_block_scores_reference(q[mine], keys, seen, size, local)
            for at, row in enumerate(range(mine.start, mine.stop)):
                length = len(keys) - (mine.stop - row) + 1
                expected = _expected(q[row], keys, length, size, local)
                count = expected.shape[1]
                for found in (scores[row, :, :count], plain[at, :, :count]):
                    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5), (sequence, at)
                assert (plain[at, :, count:] == float("-inf")).all()


def test_products_that_are_no_numbers_have_an_order(device: torch.device) -> None:
    from baton_kernels.decode_parts import plan_parts
    from baton_kernels.key_blocks import key_block_scores

    c = Case(2, 16, 16, device, torch.float32)
    q = torch.randn(1, 2, 16, device=device)
    q[0, 0, 0], q[0, 1] = float("inf"), 0.0
    parts = plan_parts(c.ints([70]), torch.tensor([5], device=device), 2, c.ints([]))
    ours = key_block_scores(q, c.cache[0], c.tables, parts, 9, 8, 1)
    seen = torch.ones(1, 70, dtype=torch.bool, device=device)
    for scores in (ours, key_block_scores_reference(q, c.index_keys[5], seen, 8, 1)):
        assert scores[..., :-1].isfinite().all()
        assert scores[0, 0, :-1].max() == torch.tensor(LARGEST_SCORE)
        assert not scores[0, 1, :-1].signbit().any()
        assert (scores[..., -1] == float("inf")).all()


@pytest.mark.parametrize("kind", ["random", "few values", "one value"])
@pytest.mark.parametrize(("size", "most", "local"), [(8, 1, 1), (8, 3, 1), (8, 3, 3), (24, 2, 1), (64, 16, 1)])
def test_the_blocks_with_the_highest_scores_are_selected(
    device: torch.device, kind: str, size: int, most: int, local: int
) -> None:
    """Each head of each query has blocks of its own, of which the last one may not be full. Of blocks with one score,
    earlier ones are selected."""
    from baton_kernels.key_blocks import select_block_slots, selected_keys

    heads, page, lengths = 3, 16, [1, size - 1, size, size + 1, most * size, most * size + 1, 900, 1537]
    blocks = -(-max(lengths) // size)
    random = torch.randn(len(lengths), heads, blocks + 2, device=device)
    scores = {"random": random, "few values": random.round() + 0.0, "one value": torch.full_like(random, -2.5)}[kind]
    expected: list[list[int]] = []
    for query, length in enumerate(lengths):
        count = -(-length // size)
        scores[query, :, max(count - local, 0) : count] = float("inf")
        scores[query, :, count:] = float("nan")
        for head in range(heads):
            line = scores[query, head].tolist()
            best = sorted(range(count), key=lambda block: -line[block])[:most]
            expected.append([key for block in sorted(best) for key in range(block * size, (block + 1) * size)])
            expected[-1] = [key for key in expected[-1] if key < length]
    tables = torch.randperm(len(lengths) * 97, device=device).view(len(lengths), 97).int()
    rows = torch.randperm(len(lengths), device=device)
    count_of = torch.tensor(lengths, dtype=torch.int32, device=device)
    slots = select_block_slots(scores, count_of, rows, tables, page, size, most)
    assert slots.shape == (len(lengths) * heads, most * size)
    counts = selected_keys(count_of, size, most).tolist()
    for at, keys in enumerate(expected):
        query, head = divmod(at, heads)
        assert counts[query] == len(keys)
        table = tables[rows[query]].tolist()
        found = [(table[key // page] * page + key % page) * heads + head for key in keys]
        assert slots[at, : len(keys)].tolist() == found
        seen = torch.arange(lengths[query], device=device) < lengths[query]
        line = scores[query, :, : -(-lengths[query] // size)]
        plain = key_block_selection_reference(line, seen, size, most)
        assert plain[head].nonzero()[:, 0].tolist() == keys


@pytest.mark.parametrize(("heads", "group"), [(2, 2), (1, 5)])
def test_attention_over_selected_blocks(device: torch.device, heads: int, group: int) -> None:
    """The kernels one after another, as the engine calls them: each query head sees the keys of its blocks alone."""
    from baton_kernels.decode_attention import decode_attention
    from baton_kernels.decode_parts import plan_parts
    from baton_kernels.key_blocks import key_block_scores, select_block_slots, selected_keys
    from baton_kernels.reference.paged_attention import AttentionVariant

    size, most, dim = 8, 3, 16
    c = Case(heads, dim, 5, device, torch.float32)
    count = len(LENGTHS)
    index_q, q = (torch.randn(count, number, dim, device=device) for number in (heads, heads * group))
    lengths, rows = c.ints(LENGTHS), torch.arange(count, device=device)
    groups = plan_parts(lengths, rows, 7, c.ints([]))
    scores = key_block_scores(index_q, c.cache[0], c.tables, groups, 24, size, 1)
    slots = select_block_slots(scores, lengths, rows, c.tables, c.page, size, most)
    each = selected_keys(lengths, size, most)[:, None].expand(-1, heads).reshape(-1)
    arrivals = torch.zeros(count * heads, dtype=torch.int32, device=device)
    parts = plan_parts(each, torch.arange(count * heads, device=device), 7, arrivals)
    keys, values = (plane.view(-1, 1, 1, dim) for plane in c.cache[1:])
    grouped = q.view(count * heads, group, dim)
    # A kernel of torch must come between the plan and the attention that reads it early.
    ours = decode_attention(grouped.clone(), keys, values, slots, AttentionVariant(0.25), parts, early=False)
    for at, planes in enumerate(c.planes):
        wide = planes.double()
        seen = torch.ones(1, wide.shape[1], dtype=torch.bool, device=device)
        plain = key_block_scores_reference(index_q[at : at + 1], planes[0, :, 0], seen, size, 1)
        selected = key_block_selection_reference(plain, seen, size, most)[0]
        for head in range(heads):
            weights = (grouped[at * heads + head].double() @ wide[1, :, head].T * 0.25).masked_fill(
                ~selected[head], float("-inf")
            )
            expected = weights.softmax(dim=1) @ wide[2, :, head]
            assert relative_error(ours[at * heads + head], expected) < 1e-5
