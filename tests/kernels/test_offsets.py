"""Tensors of more than 2^31 elements: an offset of 32 bits would wrap around before it reaches their last rows.

On a CPU, memory that was never written takes no RAM. There the interpreter runs only a kernel's last programs, and it
reports every 32-bit product or sum that wraps around.
"""

import dataclasses

import pytest
import torch
from triton.runtime import interpreter

from baton_kernels.activation import gate_mul
from baton_kernels.blocks import gather_kv, scatter_kv
from baton_kernels.compression import compress
from baton_kernels.decode_attention import decode_attention
from baton_kernels.decode_inputs import DecodeInputs
from baton_kernels.decode_parts import plan_parts
from baton_kernels.experts import run_experts, run_experts_fixed
from baton_kernels.head_products import absorb_queries, values_of
from baton_kernels.index_inputs import index_rope_and_cache
from baton_kernels.index_scores import index_scores, select_slots
from baton_kernels.kernel_configs import ExpertsConfig, LinearConfig, ProductConfig
from baton_kernels.key_blocks import key_block_scores, select_block_slots
from baton_kernels.latent_decode import latent_decode
from baton_kernels.latent_inputs import latent_rope_and_cache
from baton_kernels.latent_prefill import gather_latents, latent_prefill
from baton_kernels.linear import fixed_linear, linear
from baton_kernels.logprobs import chosen_logprobs
from baton_kernels.masks import apply_masks
from baton_kernels.norm import add_rms_norm
from baton_kernels.penalties import apply_penalties
from baton_kernels.prefill_attention import prefill_attention, prefill_tiles
from baton_kernels.reference.activation import gate_mul_reference
from baton_kernels.reference.blocks import gather_kv_reference
from baton_kernels.reference.compression import Compression, compress_reference
from baton_kernels.reference.decode_inputs import BLOCKS, FIELDS, POSITION, ROW
from baton_kernels.reference.experts import ExpertWeights, experts_reference
from baton_kernels.reference.indexed import (
    index_rope_and_cache_reference,
    index_scores_reference,
    selection_reference,
)
from baton_kernels.reference.key_blocks import key_block_scores_reference, key_block_selection_reference
from baton_kernels.reference.latent import (
    absorb_queries_reference,
    latent_prefill_reference,
    latent_rope_and_cache_reference,
    values_of_reference,
)
from baton_kernels.reference.linear import linear_reference
from baton_kernels.reference.logprobs import chosen_logprobs_reference
from baton_kernels.reference.masks import apply_masks_reference
from baton_kernels.reference.norm import add_rms_norm_reference
from baton_kernels.reference.paged_attention import AttentionVariant, paged_attention_reference
from baton_kernels.reference.penalties import apply_penalties_reference
from baton_kernels.reference.rope import rope_and_cache_reference
from baton_kernels.reference.sampling import gumbel_argmax_reference
from baton_kernels.reference.thresholds import thresholds_reference
from baton_kernels.rope import rope_and_cache
from baton_kernels.sampling import gumbel_argmax
from baton_kernels.thresholds import thresholds

from .closeness import relative_error

VOCAB = 262_144
LAST = 2  # rows that are filled, computed and compared
HALF = torch.float16
_LARGE = 1000


@pytest.fixture(autouse=True)
def last_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run the last programs alone along each axis of a large grid, and check 32-bit integers."""

    def last(*bounds: int) -> range:
        # The loops over the grid are those with one bound.
        end = bounds[0]
        return range(end - LAST, end) if len(bounds) == 1 and end >= _LARGE else range(*bounds)

    monkeypatch.setattr(interpreter, "range", last, raising=False)
    checked = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", checked)


def rows_beyond(width: int) -> int:
    """Return how many rows of this width hold 2^31 elements, and LAST more."""
    return (1 << 31) // width + LAST


def untouched(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of undefined content whose last rows are random."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor[-LAST:] = torch.randn(LAST, *shape[1:], device=device)
    return tensor


CONFIGS = {
    "one row": LinearConfig(1, 2, 2048, 1, 8, 1),
    "tiles": LinearConfig(16, 32, 256, 1, 4, 2),
    "parts": LinearConfig(16, 64, 256, 4, 4, 2),
}


def test_inputs_of_a_product(device: torch.device) -> None:
    inner = 28_672
    x = untouched(rows_beyond(inner), inner, dtype=HALF, device=device)
    weight = torch.randn(16, inner, device=device).to(HALF)
    assert relative_error(fixed_linear(x, weight)[-LAST:], linear_reference(x[-LAST:].double(), weight.double())) < 0.02


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_weight_of_a_product(device: torch.device, name: str, gate: str | None) -> None:
    inner = 16_384
    x = (torch.randn(1, inner, device=device) * inner**-0.5).to(HALF)
    weight = untouched(rows_beyond(inner) // 2 * 2, inner, dtype=HALF, device=device)
    last_gates = slice(len(weight) // 2 - LAST, len(weight) // 2)
    weight[last_gates] = torch.randn(LAST, inner, device=device)
    out = linear(x, weight, gate=gate, config=CONFIGS[name])
    kept = torch.cat([weight[last_gates], weight[-LAST:]]) if gate else weight[-LAST:]
    assert relative_error(out[:, -LAST:], linear_reference(x.double(), kept.double(), gate=gate)) < 0.02


def test_outputs_of_a_product(device: torch.device) -> None:
    x = untouched(rows_beyond(VOCAB), 64, dtype=HALF, device=device)
    weight = untouched(VOCAB, 64, dtype=HALF, device=device)
    out = fixed_linear(x, weight)[-LAST:, -LAST:]
    assert relative_error(out, linear_reference(x[-LAST:].double(), weight[-LAST:].double())) < 0.02


def test_activation(device: torch.device) -> None:
    size = 14_336
    gate_up = untouched(rows_beyond(size), 2 * size, dtype=HALF, device=device)
    torch.testing.assert_close(
        gate_mul(gate_up, "silu")[-LAST:], gate_mul_reference(gate_up[-LAST:], "silu"), rtol=0.02, atol=0.02
    )


def test_weights_of_experts(device: torch.device) -> None:
    size = 512
    experts = rows_beyond(size * size)
    gate_up = untouched(experts, 2 * size, size, dtype=HALF, device=device)
    held = ExpertWeights(gate_up, untouched(experts, size, size, dtype=HALF, device=device))
    last = ExpertWeights(held.gate_up[-LAST:].float(), held.down[-LAST:].float())
    x, weights = torch.randn(2, size, device=device).to(HALF) / size, torch.rand(2, LAST, device=device)
    order = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32, device=device)
    expected = experts_reference(x.float(), last, weights, order)
    rows = ExpertsConfig(1, ProductConfig(64, 256, 4, 1), ProductConfig(64, 64, 4, 1))
    chosen = order + experts - LAST
    assert relative_error(run_experts(x, held, weights, chosen, config=rows), expected) < 0.02
    assert relative_error(run_experts_fixed(x, held, weights, chosen), expected) < 0.02


def test_norm(device: torch.device) -> None:
    size = 8192
    x, residual = (untouched(rows_beyond(size), size, dtype=HALF, device=device) for _ in range(2))
    weight = torch.randn(size, device=device).to(HALF)
    before = residual[-LAST:].clone()
    out = add_rms_norm(x, residual, weight, 1e-6)
    expected = add_rms_norm_reference(x[-LAST:], before, weight, 1e-6)
    assert torch.equal(residual[-LAST:], before)
    assert relative_error(out[-LAST:], expected) < 0.02


def test_rotation_and_the_cache(device: torch.device) -> None:
    heads, kv_heads, dim, page = 32, 8, 128, 64
    tokens, blocks = rows_beyond(heads * dim), rows_beyond(page * kv_heads * dim)
    qkv = untouched(tokens, (heads + 2 * kv_heads) * dim, dtype=HALF, device=device)
    keys, values = (untouched(blocks, page, kv_heads, dim, dtype=HALF, device=device) for _ in range(2))
    positions = torch.zeros(tokens, dtype=torch.int64, device=device)
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    positions[-LAST:] = torch.tensor([3, (1 << 20) - 1])
    slots[-LAST:] = blocks * page - torch.tensor([1, 2])
    cos, sin = (torch.empty(1 << 20, dim // 2, device=device) for _ in range(2))
    for table in (cos, sin):
        table[positions[-LAST:]] = torch.randn(LAST, dim // 2, device=device)
    out = rope_and_cache(qkv, (cos, sin), positions, slots, keys, values, heads)
    small = [torch.empty(1, page, kv_heads, dim, dtype=HALF, device=device) for _ in range(2)]
    in_small = slots[-LAST:] - (blocks - 1) * page
    expected = rope_and_cache_reference(qkv[-LAST:], (cos, sin), positions[-LAST:], in_small, *small, heads)
    assert relative_error(out[-LAST:], expected) < 0.02
    for cache, one in zip((keys, values), small, strict=True):
        assert relative_error(cache[-1, -LAST:], one[0, -LAST:]) < 0.02


def test_attention_over_the_last_blocks(device: torch.device) -> None:
    heads, kv_heads, dim, page, length = 4, 2, 128, 64, 100
    blocks = rows_beyond(page * kv_heads * dim)
    keys, values = (untouched(blocks, page, kv_heads, dim, dtype=HALF, device=device) for _ in range(2))
    table = torch.tensor([[blocks - 1, blocks - 2]], dtype=torch.int32, device=device)
    lengths, variant = torch.tensor([length], dtype=torch.int32, device=device), AttentionVariant(dim**-0.5)
    q = torch.randn(LAST, heads, dim, device=device).to(HALF)
    in_small = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, LAST], dtype=torch.int32, device=device)
    expected = paged_attention_reference(q, keys[-2:], values[-2:], in_small, lengths, starts, variant)
    sequences, rows = prefill_tiles([0, LAST], 64)
    tiles = torch.tensor(sequences, dtype=torch.int32, device=device), torch.tensor(rows, dtype=torch.int32).to(device)
    for uniform in (False, True):
        out = prefill_attention(q, keys, values, table, lengths, starts, tiles, variant, uniform=uniform)
        assert relative_error(out, expected) < 0.02
    small_page = [cache.view(-1, page // 4, kv_heads, dim) for cache in (keys, values)]
    pages = (4 * table.unsqueeze(-1) + torch.arange(4, device=device)).view(1, -1).int()
    assert relative_error(prefill_attention(q, *small_page, pages, lengths, starts, tiles, variant), expected) < 0.02
    rows_of_one = torch.zeros(1, dtype=torch.int64, device=device)
    for cache, its_table in (((keys, values), table), (small_page, pages)):
        arrivals = torch.zeros(kv_heads, dtype=torch.int32, device=device)
        parts = plan_parts(lengths, rows_of_one, 2, arrivals)
        # A kernel of torch must come between the plan and the attention that reads it early.
        out = decode_attention(q[-1:].clone(), *cache, its_table, variant, parts)
        assert relative_error(out, expected[-1:]) < 0.02


def test_queries_of_prompts(device: torch.device) -> None:
    heads, dim, page = 32, 128, 16
    tokens = rows_beyond(heads * dim)
    q = untouched(tokens, heads, dim, dtype=HALF, device=device)
    keys, values = (torch.randn(2, page, 8, dim, device=device).to(HALF) for _ in range(2))
    starts = torch.tensor([0, tokens - LAST, tokens], dtype=torch.int32, device=device)
    lengths = torch.tensor([tokens - LAST, LAST], dtype=torch.int32, device=device)
    tables = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    sequences, rows = prefill_tiles(starts.tolist(), 64, [1])
    tiles = torch.tensor(sequences, dtype=torch.int32, device=device), torch.tensor(rows, dtype=torch.int32).to(device)
    variant = AttentionVariant(dim**-0.5)
    out = prefill_attention(q, keys, values, tables, lengths, starts, tiles, variant)
    alone = torch.tensor([0, LAST], dtype=torch.int32, device=device)
    expected = paged_attention_reference(q[-LAST:], keys, values, tables[1:], lengths[1:], alone, variant)
    assert relative_error(out[-LAST:], expected) < 0.02


def test_the_last_latents(device: torch.device) -> None:
    rank, rope, page, heads, key = 512, 64, 16, 2, 32
    blocks = rows_beyond(page * (rank + rope))
    latents = untouched(blocks, page, 1, rank + rope, dtype=HALF, device=device)
    q, kv = torch.randn(3, heads * (key + rope)).to(HALF).to(device), torch.randn(3, rank + rope).to(HALF).to(device)
    angles, positions = torch.rand(50, rope // 2, device=device), torch.tensor([3, 4, 5], device=device)
    slots = blocks * page - 1 - torch.arange(3, device=device)
    how = torch.ones(rank, dtype=HALF, device=device), 1e-6, (angles.cos(), angles.sin()), True, positions
    ours = latent_rope_and_cache(q, kv, *how, slots, latents, heads)
    expected = latents[-1:].clone()
    theirs = latent_rope_and_cache_reference(q, kv, *how, slots - (blocks - 1) * page, expected, heads)
    assert relative_error(ours, theirs) < 1e-2
    assert relative_error(latents[-1:], expected) < 1e-2
    tables = torch.tensor([[blocks - 1]], dtype=torch.int32, device=device)
    lengths, none = torch.tensor([page], dtype=torch.int32, device=device), tables[0, :0]
    parts = plan_parts(lengths, torch.zeros(1, dtype=torch.int64, device=device), 1, none)
    queries = torch.randn(1, heads, rank + rope, device=device).to(HALF)
    starts, variant = torch.tensor([0, 1]), AttentionVariant(0.1)
    attended = latent_decode(queries, latents, tables, parts, 0.1, rank)
    cache = latents[-1:]
    theirs = paged_attention_reference(queries, cache, cache[..., :rank], tables * 0, lengths, starts, variant)
    assert relative_error(attended, theirs) < 0.02
    tiles = tuple(torch.zeros(1, dtype=torch.int32, device=device) for _ in range(3))
    assert torch.equal(gather_latents(latents, tables, lengths, tiles, page), latents[-1, :, 0])  # type: ignore[arg-type]


def test_index_keys(device: torch.device) -> None:
    heads, dim, page, most = 16, 128, 64, 40
    blocks = rows_beyond(page * dim)
    keys = torch.empty(blocks, page, 1, dim, dtype=HALF, device=device)
    q, k = (torch.randn(page, size, device=device).to(HALF) for size in (heads * dim, dim))
    norm = torch.ones(dim, dtype=HALF, device=device), torch.zeros(dim, dtype=HALF, device=device)
    angles, positions = torch.rand(page, 32, device=device), torch.arange(page, device=device)
    slots = (blocks - 1) * page + positions
    how = *norm, 1e-6, (angles.cos(), angles.sin()), True, positions
    ours, expected = index_rope_and_cache(q, k, *how, slots, keys, heads), torch.empty_like(keys[-1:])
    theirs = index_rope_and_cache_reference(q, k, *how, positions, expected, heads)
    assert relative_error(ours, theirs) < 1e-2
    assert relative_error(keys[-1:], expected) < 1e-2
    tables = torch.tensor([[blocks - 1]], dtype=torch.int32, device=device)
    lengths, row = (
        torch.tensor([page], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    parts, weights = plan_parts(lengths, row, 1, tables[0, :0]), torch.randn(1, heads, device=device)
    scores = index_scores(ours[-1:], weights, keys, tables, parts, page)
    assert relative_error(scores, index_scores_reference(ours[-1:], weights, keys[-1, :, 0])) < 1e-2
    chosen = selection_reference(scores, torch.ones_like(scores, dtype=torch.bool), most)
    selected = select_slots(scores, lengths, row, tables, page, most)
    assert torch.equal(selected[0].long(), slots[chosen[0]])


def test_blocks_of_keys(device: torch.device) -> None:
    heads, dim, page, size, most = 2, 128, 64, 8, 3
    blocks = rows_beyond(page * heads * dim)
    index_keys, keys, values = (untouched(blocks, page, heads, dim, dtype=HALF, device=device) for _ in range(3))
    index_keys[-1, :, 1] = index_keys[-1, :, 0]
    index_q, q = (torch.randn(1, number, dim, device=device).to(HALF) for number in (heads, 3 * heads))
    tables = torch.tensor([[blocks - 1]], dtype=torch.int32, device=device)
    lengths, row = torch.full_like(tables[0], page), torch.zeros(1, dtype=torch.int64, device=device)
    groups = plan_parts(lengths, row, 1, tables[0, :0])
    scores = key_block_scores(index_q, index_keys, tables, groups, page // size, size, 1)
    seen = torch.ones(1, page, dtype=torch.bool, device=device)
    expected = key_block_scores_reference(index_q, index_keys[-1, :, 0], seen, size, 1)
    assert relative_error(scores[..., :-1], expected[..., :-1]) < 1e-2
    slots = select_block_slots(scores, lengths, row, tables, page, size, most)
    selected = key_block_selection_reference(scores, seen, size, most)[0]
    for head in range(heads):
        found = selected[head].nonzero()[:, 0] + (blocks - 1) * page
        assert torch.equal(slots[head].long(), found * heads + head)
    each = torch.full((heads,), size * most, dtype=torch.int32, device=device)
    parts = plan_parts(each, torch.arange(heads, device=device), 1, torch.zeros_like(each))
    grouped, starts = q.view(heads, 3, dim), torch.arange(heads + 1)
    variant, planes = AttentionVariant(dim**-0.5), [cache.view(-1, 1, 1, dim) for cache in (keys, values)]
    # As above, a kernel of torch must come between the plan and the attention.
    attended = decode_attention(grouped.clone(), *planes, slots, variant, parts, early=False)
    # The slots of the last block alone.
    last = [cache[-1:].view(-1, 1, 1, dim) for cache in (keys, values)]
    in_last = slots - (blocks - 1) * page * heads
    assert relative_error(attended, paged_attention_reference(grouped, *last, in_last, each, starts, variant)) < 0.02


def test_entries_of_windows(device: torch.device) -> None:
    page, dim = 64, 512
    shape, blocks = Compression(dim, rate=4, overlaps=True, first=0, row=1, column=0), rows_beyond(page * dim)
    weights = torch.randn(4, 2 * dim, device=device), torch.rand(dim, device=device)
    angles, positions = torch.rand(page, 32, device=device), torch.arange(8, device=device)
    projected, before = torch.randn(8, 4 * dim, device=device), torch.tensor([-1, *range(7)], device=device)
    results = []
    for op, last in ((compress, blocks - 1), (compress_reference, 0)):
        states, entries = (torch.empty(last + 1, page, 1, dim, dtype=HALF, device=device) for _ in range(2))
        slots = torch.stack([positions, before]) + torch.tensor([[page * last], [page * last]], device=device)
        slots[1, 0] = -1
        given = projected, *weights, 1e-6, (angles.cos(), angles.sin()), positions, slots, slots[0], states, entries
        op(*given, shape)
        numbers = states[-1].flatten().view(torch.float32)[: shape.numbers]
        results.append((entries[-1, [1, 5]], numbers.nan_to_num(neginf=-9.0)))
    for ours, expected in zip(*results, strict=True):
        assert relative_error(ours, expected) < 1e-2


def test_queries_of_latent_attention(device: torch.device) -> None:
    rank, rope, heads, key, value = 32, 64, 1024, 128, 128
    tokens = rows_beyond(heads * (key + rope))
    q = untouched(tokens, heads, key + rope, dtype=HALF, device=device)
    up = torch.randn(heads, key + value, rank, device=device).to(HALF) / 8
    absorbed = absorb_queries(q, up, rope)
    assert relative_error(absorbed[-LAST:, -LAST:], absorb_queries_reference(q[-LAST:], up, rope)[:, -LAST:]) < 0.01
    del absorbed
    out = torch.empty(tokens, heads, value, dtype=HALF, device=device)
    expanded, latents = (torch.randn(LAST, *size).to(HALF).to(device) for size in ((heads, 256), (rank + rope,)))
    lengths, starts = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([1, LAST], [0, tokens - LAST, tokens])
    )
    tiles = torch.tensor([1], dtype=torch.int32, device=device), starts[1:2]
    latent_prefill(q, expanded, latents, lengths, starts, lengths * 0, tiles, 0.1, rank, 0, out, 64)
    theirs = latent_prefill_reference(q[-LAST:], expanded, latents, torch.arange(LAST, device=device), 0.1, rope)
    assert relative_error(out[-LAST:, -LAST:], theirs[:, -LAST:]) < 0.02
    del out
    attended = untouched(rows_beyond(heads * rank), heads, rank, dtype=HALF, device=device)
    out = torch.empty(len(attended), heads, value, dtype=HALF, device=device)
    values_of(attended, up, out)
    theirs = values_of_reference(attended[-LAST:], up, torch.empty_like(out[-LAST:]))
    assert relative_error(out[-LAST:, -LAST:], theirs[:, -LAST:]) < 0.01


def test_pieces_of_the_cache(device: torch.device) -> None:
    layers, page, kv_heads, dim = 2, 16, 8, 256
    blocks = rows_beyond(page * kv_heads * dim)
    planes = [torch.empty(layers, blocks, page, kv_heads, dim, dtype=HALF, device=device) for _ in range(2)]
    for plane in planes:
        plane[-1, -1] = torch.randn(page, kv_heads, dim, device=device)
    table = torch.tensor([blocks - 1], device=device)
    where = (table, slice(3, 8), slice(layers - 1, layers), slice(1, kv_heads))
    packed = torch.empty(2 * 5 * (kv_heads - 1) * dim, dtype=HALF, device=device)
    total = gather_kv(planes, *where, packed.view(torch.uint8))
    expected = torch.empty_like(packed)
    assert int(total) == int(gather_kv_reference(planes, *where, expected.view(torch.uint8)))
    assert torch.equal(packed, expected)
    scatter_kv(planes, *where, (-packed).view(torch.uint8))
    gather_kv_reference(planes, *where, expected.view(torch.uint8))
    assert torch.equal(packed, -expected)


def test_block_tables(device: torch.device) -> None:
    width = 1 << 20
    tables = torch.empty(rows_beyond(width), width, dtype=torch.int32, device=device)
    inputs = DecodeInputs(1, device)
    # The last row belongs to no sequence.
    inputs.packed[ROW], inputs.packed[POSITION] = len(tables) - 2, width - 1
    inputs.packed[BLOCKS] = 77
    inputs.unpack(torch.zeros(FIELDS, len(tables), dtype=torch.int64, device=device), tables.unsqueeze(1), 1)
    assert int(inputs.slots) == int(tables[-2, -1]) == 77
    rows = torch.tensor([len(tables) - 1], device=device)
    lengths = torch.tensor([1], dtype=torch.int32, device=device)
    tables[-1, 0] = 1
    keys, values = (torch.randn(2, 1, 1, 64, device=device) for _ in range(2))
    parts = plan_parts(lengths, rows, 1, torch.zeros(1, dtype=torch.int32, device=device))
    # A kernel of torch must come between the plan and the attention that reads it early.
    q = torch.randn(1, 1, 64, device=device)
    out = decode_attention(q, keys, values, tables, AttentionVariant(1.0), parts)
    assert relative_error(out, values[1]) < 1e-5


@pytest.fixture
def logits(device: torch.device) -> torch.Tensor:
    return untouched(rows_beyond(VOCAB), VOCAB, dtype=torch.float32, device=device)


def columns(rows: int, device: torch.device, **values: float) -> dict[str, torch.Tensor]:
    return {
        name: torch.full((rows,), value, dtype=torch.int64 if isinstance(value, int) else torch.float32, device=device)
        for name, value in values.items()
    }


def test_draws(logits: torch.Tensor) -> None:
    rows, device = len(logits), logits.device
    numbers = columns(rows, device, temperatures=0.9, top_k=50, top_p=1.0, min_p=0.0)
    places = columns(rows, device, seeds=5, positions=9, choices=0)
    least = thresholds(logits, **numbers)
    last = {name: column[-LAST:] for name, column in {**numbers, **places}.items()}
    kept = {name: last[name] for name in numbers}
    torch.testing.assert_close(least[-LAST:], thresholds_reference(logits[-LAST:], **kept))
    drawn = gumbel_argmax(logits, numbers["temperatures"], least, **places, parts=2)
    expected = gumbel_argmax_reference(
        logits[-LAST:], last["temperatures"], least[-LAST:], *(last[name] for name in places)
    )  # fmt: skip
    assert torch.equal(drawn[-LAST:], expected)


def test_logprobs(logits: torch.Tensor) -> None:
    tokens = torch.full((len(logits),), VOCAB - 1, device=logits.device)
    for ours, expected in zip(
        chosen_logprobs(logits, tokens), chosen_logprobs_reference(logits[-LAST:], tokens[-LAST:]), strict=True
    ):
        torch.testing.assert_close(ours[-LAST:], expected)


def test_masks(logits: torch.Tensor) -> None:
    words, device = VOCAB // 32, logits.device
    masks = torch.empty(rows_beyond(words), words, dtype=torch.int32, device=device)
    masks[-LAST:] = torch.randint(-(2**31), 2**31, (LAST, words), device=device)
    rows = torch.arange(len(logits), device=device)
    mask_rows = torch.full((len(logits),), len(masks) - 1, device=device)
    mask_rows[-1] -= 1
    scores = torch.empty_like(logits)
    scores[-LAST:] = logits[-LAST:] + 1
    # In one row, all tokens that the mask allows are banned.
    scores[-1] = float("-inf")
    expected = scores[-LAST:].clone()
    places = torch.arange(LAST, device=device)
    apply_masks_reference(
        expected, logits[-LAST:], places, masks[-LAST:], mask_rows[-LAST:] - (len(masks) - LAST)
    )  # fmt: skip
    apply_masks(scores, logits, rows, masks, mask_rows)
    assert torch.equal(scores[-LAST:], expected)


def test_penalties(logits: torch.Tensor) -> None:
    width = 1 << 20
    history = torch.empty(rows_beyond(width), width, dtype=torch.int32, device=logits.device)
    history[-LAST:, :40] = torch.randint(VOCAB, (LAST, 40), device=logits.device)
    rows, device = len(logits), logits.device
    numbers = columns(rows, device, prompt_lens=20, lengths=40, repetition=1.0, presence=0.0, frequency=0.0)
    for name, value in (("repetition", 1.3), ("presence", 0.5), ("frequency", 0.2)):
        numbers[name][-LAST:] = value
    where = torch.zeros(rows, dtype=torch.int64, device=device)
    where[-LAST:] = len(history) - 1 - torch.arange(LAST, device=device)
    expected = logits[-LAST:].clone()
    kept = {name: column[-LAST:] for name, column in numbers.items()}
    apply_penalties_reference(
        expected, history[-LAST:, :40].contiguous(), where[-LAST:] - (len(history) - LAST), **kept
    )  # fmt: skip
    apply_penalties(logits, history, where, **numbers)
    torch.testing.assert_close(logits[-LAST:], expected)
