"""Keys and values in FP8: the codes that are written, and attention over them, against float64."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from baton_kernels.reference.kv_codes import KV_CODES
from baton_kernels.reference.paged_attention import AttentionVariant

from .hopper import on_hopper
from .test_attention import LENGTHS, VARIANTS, Case, naive, variant
from .test_rope import naive as rotated

HEADS, KV_HEADS, DIM, TOKENS = 6, 2, 8, 24
# All 253 numbers of the format.
NUMBERS = torch.arange(256, dtype=torch.uint8).view(KV_CODES).double()
NUMBERS = NUMBERS[NUMBERS.isfinite()]


def nearest_distance(x: torch.Tensor) -> torch.Tensor:
    """Return how far the nearest number of the format is from each element, in float64."""
    return (x.double()[..., None] - NUMBERS).abs().amin(dim=-1)


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_are_the_nearest_numbers(device: torch.device, dtype: torch.dtype, rotates: bool) -> None:
    from baton_kernels.reference.rope import rope_and_cache_reference
    from baton_kernels.rope import rope_and_cache

    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, DIM, dtype=dtype, device=device)
    # Numbers of every size, of those far too large and of those too small for a code.
    sizes = torch.logspace(-7, 4, TOKENS, device=device)
    qkv = (qkv.float() * sizes[:, None, None]).to(dtype).flatten(1)
    angles = torch.rand(50, DIM // 2, device=device) * 6
    positions = torch.randint(0, 50, (TOKENS,), device=device)
    slots = torch.randperm(60, device=device)[:TOKENS]
    slots[3] = -1
    scales = torch.rand(2, KV_HEADS, device=device) * 0.1 + 0.001
    found = []
    for function in (rope_and_cache, rope_and_cache_reference):
        keys, values = (torch.full((15, 4, KV_HEADS, DIM), float("nan"), device=device).to(KV_CODES) for _ in range(2))
        rotary = (angles.cos(), angles.sin()) if rotates else None
        q = function(qkv, rotary, positions, slots, keys, values, HEADS, inverses=1 / scales)
        found.append((keys.float().cpu(), values.float().cpu()))
        plain = torch.full_like(keys, 0, dtype=dtype), torch.full_like(values, 0, dtype=dtype)
        as_numbers = function(qkv, rotary, positions, slots, *plain, HEADS)
        torch.testing.assert_close(q, as_numbers, msg="queries stay as they are")
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            heads = qkv[token].view(-1, DIM).double().cpu()
            cos, sin = angles[positions[token]].cos(), angles[positions[token]].sin()
            for plane, name in enumerate(("key", "value")):
                for head in range(KV_HEADS):
                    x = heads[HEADS + plane * KV_HEADS + head]
                    if rotates and name == "key":
                        x = rotated(x, cos, sin)
                    exact = x / scales[plane, head].double().cpu()
                    code = (keys, values)[plane].flatten(0, 1)[slot, head].double().cpu()
                    # A rotated key is first rounded to its dtype, then divided in float32; a sum of two products loses
                    # some digits of its larger one.
                    lost = 4 * torch.finfo(dtype).eps * x.abs().max() / scales[plane, head].double().cpu()
                    most = exact.clamp(-448, 448)
                    assert ((code - most).abs() <= nearest_distance(most) + lost).all(), (name, token)
        written = set(slots.tolist())
        for cache in (keys, values):
            unwritten = [slot for slot in range(60) if slot not in written]
            assert cache.flatten(0, 1)[unwritten].float().isnan().all(), "only these slots"
    if not rotates:
        for ours, reference in zip(*found, strict=True):
            assert torch.equal(ours.nan_to_num(-1), reference.nan_to_num(-1)), "prefill on any device gives these codes"


def test_ties_go_to_even_and_what_is_not_finite_becomes_nan(device: torch.device) -> None:
    from baton_kernels.reference.rope import rope_and_cache_reference
    from baton_kernels.rope import rope_and_cache

    inf, nan = float("inf"), float("nan")
    cases = {
        17.0: 16.0, 19.0: 20.0, -17.0: -16.0, 2.0**-10: 0.0, 3 * 2.0**-10: 2 * 2.0**-9, 448.0: 448.0, 464.0: 448.0,
        465.0: 448.0, -1e30: -448.0, inf: nan, -inf: nan, nan: nan, 0.0: 0.0, 2.0**-9: 2.0**-9, 500.0: 448.0,
        240.0: 240.0,
    }  # fmt: skip
    qkv = torch.tensor([[*[0.0] * 16, *cases, *cases]], device=device)
    expected = torch.tensor(list(cases.values()))
    slots = torch.tensor([1], device=device)
    inverses = torch.ones(2, 1, device=device)
    for function in (rope_and_cache, rope_and_cache_reference):
        keys, values = (torch.zeros(1, 2, 1, 16, device=device).to(KV_CODES) for _ in range(2))
        function(qkv, None, slots, slots, keys, values, 1, inverses=inverses)
        for cache in (keys, values):
            assert torch.equal(cache[0, 1, 0].float().cpu().nan_to_num(7.5), expected.nan_to_num(7.5))
            assert not cache[0, 0].float().any()


class Codes(Case):
    """A case whose cache holds codes; the code of NaN wherever no sequence has a token."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        page: int,
        device: torch.device,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> None:
        super().__init__(heads, kv_heads, dim, page, device, torch.float32, value_dim=value_dim)
        self.dtype = dtype
        self.scales = torch.rand(2, kv_heads, device=device) * 0.02 + 0.003
        self.keys, self.values = ((x * 100).clamp(-448, 448).to(KV_CODES) for x in (self.keys, self.values))
        self.tokens = list(self.exact_tokens())

    def exact_tokens(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys and values that each sequence's codes stand for, in float64."""
        page, exact = self.keys.shape[1], self.scales.double().cpu()[:, :, None]
        for table, length in zip(self.tables.tolist(), LENGTHS, strict=True):
            k, v = (
                torch.stack([cache[table[at // page], at % page] for at in range(length)]).double().cpu() * scale
                for cache, scale in zip((self.keys, self.values), exact, strict=True)
            )
            yield k, v

    def queries(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.heads, self.dim, dtype=self.dtype, device=self.device)

    def check(self, out: torch.Tensor, q: torch.Tensor, starts: list[int], how: AttentionVariant) -> None:
        """Compare with float64. The bound follows from how attention is computed.

        Codes are exact in the dtype of queries. Scores are sums of dim products in float32, whose errors change a
        weight by that factor at most, twice, as the sum of all weights has them too. Weights and results are rounded to
        the dtype of queries. An error of a weight is one of weight * |value|. Weights are at most 1 before they are
        divided by their sum, which is at least 1. Rounding errors of very small numbers do not shrink with them.
        """
        unit = torch.finfo(self.dtype).eps / 2
        least = torch.finfo(self.dtype).smallest_normal * unit
        small = torch.finfo(torch.float32).eps
        for (k, v), first, end in zip(self.tokens, starts, starts[1:], strict=False):
            some, result = q[first:end].cpu(), out[first:end].double().cpu()
            group = some.shape[1] // k.shape[1]
            sizes = some.double().abs().transpose(0, 1) @ k.abs().repeat_interleave(group, dim=1).permute(1, 2, 0)
            # ALiBi's slopes are below 1, so that it adds at most the distance of the last key.
            score = small * (
                (self.dim + 8) * float(sizes.max()) * how.scale + 8 * (len(k) if how.alibi is not None else 1)
            )
            share = 2 * score + 2 * small * len(k) + 2.1 * unit
            tiny = least * (1 + float(v.abs().sum(dim=0).max()))
            bound = share * naive(some, k, v.abs(), how) + tiny + 1e-12
            difference = (result - naive(some, k, v, how)).abs()
            assert (difference <= bound).all(), f"{float((difference / bound).max())} times the bound"


# The copy engine fetches whole blocks of 64 tokens.
CASES = [
    *((kind, 4, 1, 32, 32, 16, torch.float32) for kind in VARIANTS),
    *((kind, 6, 2, 80, 80, 64, torch.float16) for kind in ("plain", "all")),
    ("sinks", 2, 1, 64, 64, 64, torch.bfloat16),
    ("sinks", 4, 2, 48, 32, 64, torch.bfloat16),
    ("window", 4, 1, 24, 40, 16, torch.float32),
]


@pytest.mark.parametrize(("kind", "heads", "kv_heads", "dim", "value_dim", "page", "dtype"), CASES)
def test_decode(
    device: torch.device, kind: str, heads: int, kv_heads: int, dim: int, value_dim: int, page: int, dtype: torch.dtype
) -> None:
    from baton_kernels.decode_attention import SEPARATE_JOIN_SEQUENCES, decode_attention
    from baton_kernels.decode_parts import plan_parts

    case, count = Codes(heads, kv_heads, dim, page, device, dtype, value_dim), len(LENGTHS)
    how = variant(kind, heads, dim, device)
    rows = torch.arange(count, device=device)
    # A second kernel joins the parts of a small batch, and the decode kernel those of a larger one.
    for copies, capacity in ((1, 1), (1, 32), (SEPARATE_JOIN_SEQUENCES // count + 1, 32)):
        arrivals = torch.zeros(copies * count * kv_heads, dtype=torch.int32, device=device)
        parts = plan_parts(case.lengths.repeat(copies), rows.repeat(copies), capacity, arrivals)
        # A kernel of torch must come between the plan and the attention that reads it early.
        q = case.queries(copies * count)
        out = decode_attention(q, case.keys, case.values, case.tables, how, parts, scales=case.scales)
        for some, results in zip(q.split(count), out.split(count), strict=True):
            case.check(results, some, list(range(count + 1)), how)


@pytest.mark.parametrize(("kind", "heads", "kv_heads", "dim", "value_dim", "page", "dtype"), CASES)
def test_prefill(
    device: torch.device, kind: str, heads: int, kv_heads: int, dim: int, value_dim: int, page: int, dtype: torch.dtype
) -> None:
    from baton_kernels.prefill_attention import prefill_attention, prefill_tiles
    from baton_kernels.reference.paged_attention import paged_attention_reference

    case, how = Codes(heads, kv_heads, dim, page, device, dtype, value_dim), variant(kind, heads, dim, device)
    starts = [0, 1, 17, 47, 187]
    q = case.queries(starts[-1])
    facts = (starts, *prefill_tiles(starts, 64))
    where, *tiles = (torch.tensor(x, dtype=torch.int32, device=device) for x in facts)
    planes = q, case.keys, case.values, case.tables, case.lengths, where
    for uniform in (False, True) if kind == "plain" else (False,):
        out = prefill_attention(*planes, (tiles[0], tiles[1]), how, uniform=uniform, scales=case.scales)
        case.check(out, q, starts, how)
    case.check(paged_attention_reference(*planes, how, case.scales), q, starts, how)


def use_powers_of_two(case: Codes) -> None:
    """Give a case scales with which copies in bfloat16 are exact."""
    case.scales.copy_(torch.exp2(case.scales.log2().round()))
    case.tokens = list(case.exact_tokens())


@pytest.mark.parametrize(("window", "chunked"), [(0, False), (20, False), (20, True)])
def test_copies_in_more_bits_have_each_number_that_a_query_sees(
    device: torch.device, window: int, chunked: bool
) -> None:
    from baton_kernels.wide_blocks import widen_blocks

    page, new = 16, [1, 10, 30, 190]
    case = Codes(4, 2, 24, page, device, torch.bfloat16)
    use_powers_of_two(case)
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, device=device)
    where = [(sequence, place) for sequence in (1, 3, 2) for place in range(case.tables.shape[1])]
    blocks = [torch.tensor(part, dtype=torch.int32, device=device) for part in zip(*where, strict=True)]
    wide = [torch.full((len(where), page, 2, 24), 7.0, dtype=torch.bfloat16, device=device) for _ in range(2)]
    how = AttentionVariant(1.0, window=window, chunked=chunked)
    tables = case.tables.clone()
    seen = []
    for sequence, place in where:
        position = LENGTHS[sequence] - new[sequence]
        oldest = 0 if not window else position // window * window if chunked else position - window + 1
        seen.append(place * page < LENGTHS[sequence] and (place + 1) * page > oldest)
        if not seen[-1]:
            tables[sequence, place] = 1 << 30  # to read there would be an error
    widen_blocks(
        case.keys, case.values, tables, case.lengths, starts, (blocks[0], blocks[1]), case.scales, how, wide[0], wide[1]
    )
    assert not all(seen)
    for copy, cache, scales in zip(wide, (case.keys, case.values), case.scales, strict=True):
        for at, (sequence, place) in enumerate(where):
            if seen[at]:
                # Nothing reads the rest of the last block.
                tokens = slice(LENGTHS[sequence] - place * page)
                codes = cache[case.tables[sequence, place]][tokens].float() * scales[:, None]
                assert torch.equal(copy[at][tokens], codes.bfloat16())
            else:
                assert (copy[at] == 7.0).all()


@on_hopper
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (4, 1, 128), (2, 1, 256)])
def test_the_kernel_for_hopper_reads_copies(device: torch.device, heads: int, kv_heads: int, dim: int) -> None:
    from baton_kernels.hopper_prefill import BLOCK_QUERIES, hopper_prefill
    from baton_kernels.prefill_attention import prefill_tiles
    from baton_kernels.wide_blocks import widen_blocks

    case = Codes(heads, kv_heads, dim, 64, device, torch.bfloat16)
    use_powers_of_two(case)
    starts = [0, 1, 17, 60, 200]
    width = case.tables.shape[1]
    where, sequences, rows = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, *prefill_tiles(starts, BLOCK_QUERIES))
    )
    owners = torch.arange(len(LENGTHS), device=device).repeat_interleave(width).int()
    places = torch.arange(width, device=device).repeat(len(LENGTHS)).int()
    wide = [torch.zeros(len(owners), 64, kv_heads, dim, dtype=torch.bfloat16, device=device) for _ in range(2)]
    tables = torch.arange(len(owners), device=device).int().view(len(LENGTHS), width)
    for kind in ("plain", "window", "chunks"):
        how, q = variant(kind, heads, dim, device), case.queries(starts[-1])
        widen_blocks(
            case.keys, case.values, case.tables, case.lengths, where, (owners, places), case.scales, how, *wide
        )
        out = hopper_prefill(q, *wide, tables, case.lengths, where, (sequences, rows), how)
        case.check(out, q, starts, how)
