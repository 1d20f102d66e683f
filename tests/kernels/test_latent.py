"""The kernels of latent attention and their references against float64, over caches that hold NaN beside the tokens."""

import pytest
import torch

from .closeness import poisoned, relative_error

LENGTHS = [1, 16, 77, 190]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}


class Case:
    """Sequences in shuffled blocks of a cache that is NaN wherever no sequence has a token. Its rows have room for
    larger latents."""

    def __init__(
        self, heads: int, rank: int, rope: int, key: int, value: int, page: int, device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.heads, self.rank, self.rope, self.key, self.value = heads, rank, rope, key, value
        self.scale, self.device, self.dtype = (key + rope) ** -0.5, device, dtype
        most = -(-max(LENGTHS) // page)
        order = torch.randperm(most * len(LENGTHS) + 3)
        self.tables = order[: most * len(LENGTHS)].view(len(LENGTHS), most).int().to(device)
        rows = torch.full((len(order), page, 1, rank + rope + 8), float("nan"), dtype=dtype, device=device)
        self.page, self.latents, self.unused = page, rows[..., : rank + rope], int(order[-1])
        self.tokens = [torch.randn(length, rank + rope).to(dtype) for length in LENGTHS]
        for table, latents in zip(self.tables.tolist(), self.tokens, strict=True):
            for at, latent in enumerate(latents):
                self.latents[table[at // page], at % page, 0] = latent.to(device)
        self.up = (torch.randn(heads, key + value, rank) / rank**0.5).to(dtype).to(device)
        self.sinks: torch.Tensor | None = None
        self.window, self.oldest = 0, [0] * len(LENGTHS)

    def add_sinks(self) -> None:
        """Give each head a sink, some of them far above or below its scores."""
        self.sinks = torch.randn(self.heads, device=self.device) * 4

    def set_window(self, window: int, counts: list[int]) -> None:
        """Limit what queries see, and remove what the last queries no longer see. counts: of these, by sequence."""
        self.window = window
        for sequence, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
            oldest = self.oldest[sequence] = max(length - count + 1 - window, 0) if window else 0
            table = self.tables[sequence]
            self.latents[table[oldest // self.page], : oldest % self.page] = float("nan")
            table[: oldest // self.page] = self.unused

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def expected(self, q: torch.Tensor, starts: list[int]) -> torch.Tensor:
        """Return attention of the last queries of each sequence by the definition, in float64."""
        chunks = []
        up = self.up.cpu().double()
        for latents, first, end in zip(self.tokens, starts, starts[1:], strict=False):
            queries, wide = q[first:end].cpu().double(), latents.double()
            for at, query in enumerate(queries):
                end = len(wide) - len(queries) + at + 1
                seen = wide[max(end - self.window, 0) if self.window else 0 : end]
                expanded = torch.einsum("hor,kr->hko", up, seen[:, : self.rank])
                keys = torch.cat([expanded[..., : self.key], seen[None, :, self.rank :].expand(self.heads, -1, -1)], -1)
                scores = (query[:, None] * keys).sum(-1) * self.scale
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks.cpu().double()[:, None]], dim=1)
                weights = scores.softmax(-1)[:, : len(seen)]
                chunks.append((weights[..., None] * expanded[..., self.key :]).sum(1))
        return torch.stack(chunks)


SHAPES = {
    "one head tile": (6, 32, 16, 16, 24, 16),
    "odd sizes": (3, 40, 8, 20, 12, 4),
    "two head tiles": (20, 32, 16, 16, 16, 64),
    "no rotation": (3, 16, 0, 16, 16, 8),
}


def case(shape: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Case:
    return Case(*SHAPES[shape], device, dtype)


@pytest.mark.parametrize(("sinks", "window"), [(True, 0), (False, 33)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(device: torch.device, shape: str, dtype: torch.dtype, sinks: bool, window: int) -> None:
    """Sequences in parts, one query each, in rows of a larger tensor of tables."""
    from baton_kernels.decode_parts import plan_parts
    from baton_kernels.head_products import absorb_queries, values_of
    from baton_kernels.latent_decode import latent_decode

    c = case(shape, device, dtype)
    if sinks:
        c.add_sinks()
    count = len(LENGTHS)
    c.set_window(window, [1] * count)
    rows = torch.randperm(count, device=device)
    tables = torch.empty_like(c.tables)
    tables[rows] = c.tables
    # One part for each sequence, several, and so many groups that a program joins the parts of all heads.
    for copies, capacity in {"odd sizes": [(1, 1), (1, 3), (17, 80)]}.get(shape, [(1, 8)]):
        q = c.random(copies * count, c.heads, c.key + c.rope)
        expected = torch.cat([c.expected(some, list(range(count + 1))) for some in q.split(count)])
        lengths, none = c.ints(LENGTHS * copies), c.ints([])
        parts = plan_parts(lengths, rows.repeat(copies), capacity, none)
        absorbed = absorb_queries(q, c.up, c.rope)
        attended = latent_decode(absorbed, c.latents, tables, parts, c.scale, c.rank, sinks=c.sinks, window=window)
        out = values_of(attended, c.up, poisoned(copies * count, c.heads, c.value, like=q))
        assert relative_error(out.cpu(), expected) < TOLERANCE[dtype], (copies, capacity)


@pytest.mark.parametrize(("sinks", "window"), [(True, 0), (False, 33)])
@pytest.mark.parametrize("capacity", [1, 8])
@pytest.mark.parametrize("tokens", [1, 4])
def test_groups_of_queries(device: torch.device, tokens: int, capacity: int, sinks: bool, window: int) -> None:
    """The last tokens of the sequences. The first queries of a group may see nothing of its last part, and its last
    ones nothing of its first."""
    from baton_kernels.decode_parts import plan_parts
    from baton_kernels.head_products import absorb_queries, values_of
    from baton_kernels.latent_decode import latent_decode

    c = case("one head tile", device)
    if sinks:
        c.add_sinks()
    starts, firsts, lengths, rows = [0, 1, 17, 23, 28], [0], [], []
    c.set_window(window, [1, 16, 6, 5])
    for sequence, length in enumerate(LENGTHS):
        for first in range(starts[sequence], starts[sequence + 1], tokens):
            firsts.append(min(first + tokens, starts[sequence + 1]))
            lengths.append(length - starts[sequence + 1] + firsts[-1])
            rows.append(sequence)
    q = c.random(starts[-1], c.heads, c.key + c.rope)
    where = torch.tensor(rows, device=device)
    parts = plan_parts(c.ints(lengths), where, capacity, c.ints([]))
    absorbed = absorb_queries(q, c.up, c.rope)
    attended = latent_decode(
        absorbed, c.latents, c.tables, parts, c.scale, c.rank, tokens, c.ints(firsts) if tokens > 1 else None, c.sinks,
        window,
    )  # fmt: skip
    out = values_of(attended, c.up, poisoned(starts[-1], c.heads, c.value, like=q))
    assert relative_error(out.cpu(), c.expected(q, starts)) < 1e-5


@pytest.mark.parametrize(("sinks", "window"), [(False, 0), (True, 0), (False, 33)])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("one head tile", torch.float32),
        ("odd sizes", torch.float32),
        # The copy engine fetches the tiles.
        ("two head tiles", torch.float16),
        ("no rotation", torch.float16),
    ],
)
def test_prefill(device: torch.device, shape: str, dtype: torch.dtype, sinks: bool, window: int) -> None:
    """A whole prompt of one token, a whole one, a chunk after a prefix, and a chunk longer than a tile."""
    from baton_kernels.latent_prefill import gather_latents, gather_tiles, latent_prefill, queries_per_tile
    from baton_kernels.prefill_attention import prefill_tiles
    from baton_kernels.reference.latent import gather_latents_reference, latent_prefill_reference

    c = case(shape, device, dtype)
    if sinks:
        c.add_sinks()
    starts = [0, 1, 17, 47, 187]
    c.set_window(window, [1, 16, 30, 140])
    q = c.random(starts[-1], c.heads, c.key + c.rope)
    expected = c.expected(q, starts)
    which, queries = [1, 2, 3], queries_per_tile(q.element_size())
    tiles, rows, keys = gather_tiles(which, LENGTHS, c.oldest)
    lengths = c.ints(LENGTHS)
    gathered = gather_latents(c.latents, c.tables, lengths, tuple(map(c.ints, tiles)), keys)  # type: ignore[arg-type]
    ends = [row + LENGTHS[sequence] for row, sequence in zip(rows, which, strict=True)]
    for row, end, sequence in zip(rows, ends, which, strict=True):
        oldest = c.oldest[sequence]
        plain = gather_latents_reference(c.latents, c.tables, [sequence], LENGTHS)[oldest:]
        assert torch.equal(gathered[row + oldest : end], plain)
    # Behind the keys lies what another call has left.
    room = poisoned(keys + 64, c.heads, c.key + c.value, like=q)
    wide = torch.einsum("kr,hor->kho", gathered[:, : c.rank].double(), c.up.double())
    room[:keys] = wide.to(dtype)
    out = poisoned(starts[-1], c.heads, c.value, like=q)
    where = [c.ints(part) for part in (starts, [0, *rows], *prefill_tiles(starts, queries, which))]
    # The heads in two rounds of unequal size.
    middle = c.heads // 3
    for first, end in ((0, middle), (middle, c.heads)):
        expanded = room[:, first:end].contiguous()[:keys]
        latent_prefill(
            q, expanded, gathered, lengths, where[0], where[1], (where[2], where[3]), c.scale, c.rank, first, out,
            queries, c.sinks, window,
        )  # fmt: skip
    assert relative_error(out[1:].cpu(), expected[1:]) < TOLERANCE[dtype]
    assert out[0].isnan().all(), "a sequence without tiles is not written"
    for at, sequence in enumerate(which):
        chunk = slice(starts[sequence], starts[sequence + 1])
        oldest, length, count = c.oldest[sequence], LENGTHS[sequence], chunk.stop - chunk.start
        mine = slice(rows[at] + oldest, ends[at])
        positions = torch.arange(length - count, length, device=device) - oldest
        plain = latent_prefill_reference(
            q[chunk], wide[mine], gathered[mine], positions, c.scale, c.rope, c.sinks, window
        )
        assert relative_error(plain.cpu(), expected[chunk]) < (1e-6 if dtype == torch.float32 else 1e-3)


def test_listed_tokens(device: torch.device) -> None:
    """A list of slots in place of a table, as if each token were a block."""
    from baton_kernels.decode_parts import plan_parts
    from baton_kernels.head_products import absorb_queries, values_of
    from baton_kernels.latent_decode import latent_decode

    c = case("odd sizes", device)
    at, length = 2, LENGTHS[2]
    positions = torch.arange(length, device=device)
    slots = c.tables[at, positions // c.page] * c.page + positions % c.page
    q, rows = c.random(1, c.heads, c.key + c.rope), torch.zeros(1, dtype=torch.int64, device=device)
    parts = plan_parts(c.ints([length]), rows, 1, c.ints([]))
    tokens = c.latents.view(-1, 1, 1, c.rank + c.rope)
    attended = latent_decode(absorb_queries(q, c.up, c.rope), tokens, slots[None], parts, c.scale, c.rank)
    out = values_of(attended, c.up, poisoned(1, c.heads, c.value, like=q))
    assert relative_error(out.cpu(), c.expected(q, [0, 0, 0, 1])) < 1e-5


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("tokens", [1, 21, 70])
def test_products_of_heads(device: torch.device, tokens: int, fixed: bool) -> None:
    from baton_kernels.head_products import absorb_queries, values_of
    from baton_kernels.reference.latent import absorb_queries_reference, values_of_reference

    heads, rank, rope, key, value = 3, 72, 6, 20, 12
    up = torch.randn(heads, key + value, rank, device=device)
    q = torch.randn(tokens, heads, key + rope, device=device)
    absorbed = torch.einsum("thk,hkr->thr", q[..., :key].double(), up[:, :key].double())
    for result in (absorb_queries(q, up, rope, fixed), absorb_queries_reference(q, up, rope)):
        assert relative_error(result[..., :rank], absorbed) < 1e-6
        assert torch.equal(result[..., rank:], q[..., key:])
    attended = torch.randn(tokens, heads, rank, device=device)
    values = torch.einsum("thr,hvr->thv", attended.double(), up[:, key:].double())
    out = poisoned(tokens, heads, value, like=q)
    assert relative_error(values_of(attended, up, out, fixed), values) < 1e-6
    assert relative_error(values_of_reference(attended, up, torch.empty_like(out)), values) < 1e-6


@pytest.mark.parametrize("rope_norm", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "rank", "rope", "key"), [(6, 32, 16, 16), (3, 40, 6, 20), (2, 16, 0, 8)])
def test_rope_and_cache(
    device: torch.device, interleaved: bool, heads: int, rank: int, rope: int, key: int, rope_norm: bool
) -> None:
    from baton_kernels.latent_inputs import latent_rope_and_cache
    from baton_kernels.reference.latent import latent_rope_and_cache_reference

    tokens, half = 7, rope // 2
    # Queries and latents come from one product.
    fused = torch.randn(tokens, heads * (key + rope) + rank + rope, device=device)
    q, kv = fused.split([heads * (key + rope), rank + rope], dim=1)
    norm, angles = torch.randn(rank, device=device), torch.rand(50, half, device=device) * 6
    positions, slots = torch.randint(0, 50, (tokens,), device=device), torch.randperm(40, device=device)[:tokens]
    slots[3] = -1
    turns = torch.polar(torch.ones(50, half, dtype=torch.float64), angles.double().cpu())[positions.cpu()]

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = x.double().cpu()
        pairs = torch.stack([pairs[..., 0::2], pairs[..., 1::2]] if interleaved else list(pairs.chunk(2, -1)), dim=-1)
        result = torch.view_as_complex(pairs.contiguous()) * turns.view(tokens, *[1] * (x.dim() - 2), half)
        return torch.cat([result.real, result.imag], dim=-1)

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.double().cpu()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double().cpu()

    queries, of_ends = q.view(tokens, heads, key + rope), torch.randn(rope, device=device) if rope_norm else None
    ends = kv[:, rank:] if of_ends is None else normed(kv[:, rank:], of_ends)
    expected = torch.cat([normed(kv[:, :rank], norm), turned(ends)], -1)
    kept = (slots >= 0).cpu()
    for function in (latent_rope_and_cache, latent_rope_and_cache_reference):
        # Rows of the cache have room for larger latents.
        rows = poisoned(10, 4, 1, rank + rope + 4, like=fused)
        latents = rows[..., : rank + rope]
        out = function(
            q,
            kv,
            norm,
            1e-6,
            (angles.cos(), angles.sin()),
            interleaved,
            positions,
            slots,
            latents,
            heads,
            None,
            of_ends,
        )
        assert rows[..., rank + rope :].isnan().all()
        assert torch.equal(out[..., :key], queries[..., :key])
        if rope:
            assert relative_error(out[..., key:].cpu(), turned(queries[..., key:])) < 1e-6
        written = latents.flatten(0, 2).cpu()
        assert relative_error(written[slots.cpu()[kept]], expected[kept]) < 1e-6
        untouched = torch.ones(40, dtype=torch.bool)
        untouched[slots.cpu()[kept]] = False
        assert torch.equal(written.isnan().any(-1), untouched), "only these slots"
