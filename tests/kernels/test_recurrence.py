"""The gated delta rule and Mamba 2 over paged states, against each whole sequence in float64."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from baton_kernels.recurrence import recurrence, recurrence_fixed
from baton_kernels.reference.recurrence import StateInputs, StateShape, recurrence_reference

from .test_short_conv import slots_of

SHAPES = {
    "two-groups": StateShape(2, 2, 4, 6, 5, 4),
    "shared-keys": StateShape(1, 1, 3, 8, 8, 3),
    "as-many-keys": StateShape(2, 4, 4, 4, 40, 2),
    "no-convolution": StateShape(2, 2, 4, 5, 6, 1),
}
OPS = {"reference": recurrence_reference, "tiles": recurrence, "tokens": recurrence_fixed}
# Tokens of a block and, after each step, of each sequence that are computed.
FEW = (4, ((5, 1, 1), (6, 1, 2), (7, 1, 4), (11, 1, 14)))
SHORT_TILES = (20, ((5, 1, 1), (6, 1, 2), (7, 1, 4), (43, 1, 50)))
LONG_TILES = (80, ((70, 1, 3), (150, 1, 75), (171, 1, 170)))
CASES = [
    *((rule, shape) for rule in ("delta", "mamba") for shape in SHAPES),
    ("delta by element", "two-groups"),
    ("delta by element", "shared-keys"),
    ("bounded delta by element", "as-many-keys"),
    ("steady mamba", "no-convolution"),
]
BY_ELEMENT = [case for case in CASES if "element" in case[0]]
IN_TILES = [case for case in CASES if case not in BY_ELEMENT]
WAYS = {
    "reference": (recurrence_reference, FEW, CASES),
    "tokens": (recurrence_fixed, FEW, CASES),
    "short tiles": (recurrence, SHORT_TILES, IN_TILES),
    "long tiles": (recurrence, LONG_TILES, IN_TILES),
    "no tiles": (recurrence, FEW, [CASES[0], *BY_ELEMENT]),
}


def whole_sequence(
    x: torch.Tensor, filters: torch.Tensor, bias: torch.Tensor, decays: torch.Tensor, parts: torch.Tensor, delta: bool,
    skip: torch.Tensor, shape: StateShape,
) -> torch.Tensor:  # fmt: skip
    """Return what the heads of a sequence read. x: [T, channels]. decays: [T, heads, elements of a key or 1]. parts:
    [T, heads]. delta: whether the rule is that of gated delta networks."""
    padded = functional.pad(x.T, (shape.length - 1, 0))[None]
    wide = functional.silu(functional.conv1d(padded, filters[:, None], bias, groups=shape.channels)[0].T)
    q, k, v = wide.split([shape.keys, shape.keys, shape.values], dim=1)
    shared = shape.value_heads // shape.key_heads
    q, k = (each.unflatten(1, (shape.key_heads, -1)) for each in (q, k))
    if delta:
        q, k = functional.normalize(q, dim=2) / shape.key_dim**0.5, functional.normalize(k, dim=2)
    v = v.unflatten(1, (shape.value_heads, -1))
    out = torch.zeros_like(v)
    for head in range(shape.value_heads):
        state = torch.zeros(shape.value_dim, shape.key_dim, dtype=x.dtype, device=x.device)
        for token in range(len(x)):
            key, value, part = k[token, head // shared], v[token, head], parts[token, head]
            state = state * decays[token, head]
            known = part * torch.outer(state @ key, key) if delta else 0
            state = state - known + part * torch.outer(value, key)
            out[token, head] = state @ q[token, head // shared] + skip[head] * value
    return out


@pytest.mark.parametrize(
    ("op", "steps", "rule", "name"),
    [
        pytest.param(op, steps, *case, id="-".join([way, *case]))
        for way, (op, steps, cases) in WAYS.items()
        for case in cases
    ],
)
def test_chunks_of_sequences_give_the_results_of_each_whole_one(
    op: type, steps: tuple[int, Any], rule: str, name: str, device: torch.device
) -> None:
    (block_size, ends_of_steps), shape = steps, SHAPES[name]
    lengths, heads, delta = ends_of_steps[-1], shape.value_heads, "delta" in rule
    least = -3.0 if "bounded" in rule else 0.0
    sizes = [shape.channels, heads * (shape.key_dim if "element" in rule else 1), heads]
    filters = torch.randn(shape.channels, shape.length, device=device) / 2
    log_decay, skip = torch.randn(2, heads, device=device)
    rate_bias = torch.randn(sizes[1], device=device)
    bias = torch.randn(shape.channels, device=device)
    added = (None, None) if delta else (bias, skip)
    wholes = [torch.randn(count, sum(sizes), device=device) for count in lengths]
    expected = []
    for whole in wholes:
        x, rates, gates = whole.double().split(sizes, dim=1)
        moves = (rates + rate_bias).unflatten(1, (heads, -1))
        step, speed = functional.softplus(moves), log_decay.double().exp()[:, None]
        decays = torch.exp(least * torch.sigmoid(speed * moves) if least else -speed * step)
        if "steady" in rule:
            step = torch.ones_like(step)
            decays = torch.exp(-speed * step)
        parts, zeros = gates.sigmoid() if delta else step[..., 0], torch.zeros(shape.channels).double().to(device)
        plus = (zeros, zeros) if delta else (bias.double(), skip.double())
        expected.append(whole_sequence(x, filters.double(), plus[0], decays, parts, delta, plus[1], shape))
    tables = torch.randperm(20)[:12].view(3, 4)
    rooms = (-(-count // block_size) + 1 for count in shape.plane_elements)
    keys, values = (torch.full((20, block_size, shape.groups, room), float("nan"), device=device) for room in rooms)

    def compute(x: torch.Tensor, rates: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        replaced = gates if delta else None
        moves = (None, None) if "steady" in rule else (rates, rate_bias)
        given = StateInputs(x, filters, added[0], moves[0], replaced, log_decay, moves[1], added[1], least=least)
        result: torch.Tensor = op(given, slots, keys, values, shape)
        return result

    results: list[list[torch.Tensor]] = [[], [], []]
    # Each step has a chunk of every sequence that is left, and two tokens of none.
    for ends in ends_of_steps:
        chunks = [(number, sum(map(len, results[number])), end) for number, end in enumerate(ends)]
        chunks = [chunk for chunk in chunks if chunk[1] < chunk[2]]
        rows = torch.cat([wholes[number][first:end] for number, first, end in chunks])
        slots = torch.cat([slots_of(tables[number], first, end, 2, block_size) for number, first, end in chunks], dim=1)
        rows = torch.cat([rows, torch.randn_like(wholes[0][:2])])
        x, rates, gates = rows.split(sizes, dim=1)
        slots = functional.pad(slots, (0, 2), value=-1).to(device)
        out = compute(x, rates, gates, slots)
        for number, first, end in chunks:
            results[number].append(out[: end - first])
            out = out[end - first :]
    for result, correct in zip(results, expected, strict=True):
        torch.testing.assert_close(torch.cat(result).double(), correct, rtol=1e-3, atol=1e-3)
    # A complete block has the state at its end, from which a sequence with the same beginning can go on.
    complete = 2 * block_size
    x, rates, gates = wholes[2][complete:].split(sizes, dim=1)
    table = torch.cat([tables[2, :2], torch.tensor([19, 18])])
    slots = slots_of(table, complete, lengths[2], 2, block_size).to(device)
    out = compute(x, rates, gates, slots)
    torch.testing.assert_close(out.double(), expected[2][complete:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("op", [recurrence_reference, recurrence], ids=["reference", "kernel"])
def test_states_beside_latents_lie_in_one_plane(op: type, device: torch.device) -> None:
    shape = StateShape(1, 2, 4, 6, 5, 4)
    rates, gates = torch.randn(2, 7, 4, device=device)
    decay, bias = torch.randn(2, 4, device=device)
    inputs = torch.randn(7, shape.channels, device=device)
    given = StateInputs(inputs, torch.randn(shape.channels, 4, device=device), None, rates, gates, decay, bias, None)
    rows = [-(-count // 10) for count in shape.plane_elements]
    size = shape.rows([40])
    assert size == sum(rows)
    slots = torch.stack([torch.arange(7), torch.arange(-1, 6)]).to(device)
    latents = torch.full((2, size, 1, 10), float("nan"), device=device)
    apart = [torch.zeros(2, size, 1, 10, device=device) for _ in rows]
    expected = op(given, slots, *apart, shape)
    torch.testing.assert_close(op(given, slots, *shape.planes([latents]), shape), expected, rtol=0, atol=0)
    together = torch.cat([plane[0, :count] for plane, count in zip(apart, rows, strict=True)])
    torch.testing.assert_close(latents[0].nan_to_num(0.0), together, rtol=0, atol=0)
    assert latents[1].isnan().all()


def inputs_of(shape: StateShape, tokens: int, device: torch.device) -> StateInputs:
    """Return random inputs of a layer with the delta rule."""
    rates, gates = torch.randn(2, tokens, shape.value_heads, device=device)
    decay, bias = torch.randn(2, shape.value_heads, device=device)
    filters = torch.randn(shape.channels, shape.length, device=device)
    return StateInputs(
        torch.randn(tokens, shape.channels, device=device), filters, None, rates, gates, decay, bias, None
    )


def planes_of(shape: StateShape, blocks: int, block_size: int, device: torch.device) -> list[torch.Tensor]:
    return [
        torch.zeros(blocks, block_size, shape.groups, -(-count // block_size), device=device)
        for count in shape.plane_elements
    ]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("broken", ["inputs", "rates", "gates"])
def test_numbers_that_are_not_finite_stay_in_their_sequence(op: type, broken: str, device: torch.device) -> None:
    shape, table = SHAPES["two-groups"], torch.arange(3)
    given = inputs_of(shape, 12, device)
    slots = torch.cat([slots_of(table[index:], 0, 4, 2, 32) for index in range(3)], dim=1).to(device)
    expected = op(given, slots, *planes_of(shape, 3, 32, device), shape)
    getattr(given, broken)[5, ::2], getattr(given, broken)[5, 1::2] = float("nan"), float("inf")
    planes = planes_of(shape, 3, 32, device)
    result = op(given, slots, *planes, shape)
    for whole in (slice(0, 4), slice(8, 12)):
        torch.testing.assert_close(result[whole], expected[whole], rtol=0, atol=0)
    assert not result[6].isfinite().all()
    assert all(plane[[0, 2]].isfinite().all() for plane in planes)


def test_tiles_of_equal_tokens_are_as_precise_as_one_token_after_another(device: torch.device) -> None:
    shape = StateShape(1, 1, 1, 32, 16, 4)
    given = inputs_of(shape, 200, device)
    given.inputs[:] = given.inputs[:1].clone()
    # The state barely decays and is replaced almost completely, so each token depends on all others.
    given.rates.fill_(-9.0), given.gates.fill_(4.0)
    slots = slots_of(torch.arange(2), 0, 200, 2, 128).to(device)
    expected = recurrence_reference(given, slots, *planes_of(shape, 2, 128, device), shape)
    result = recurrence(given, slots, *planes_of(shape, 2, 128, device), shape)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", [recurrence, recurrence_fixed])
def test_short_steps_are_precise(op: type, device: torch.device) -> None:
    """What Mamba adds to a state is as small as the step is short, and rounding must not lose it."""
    shape = StateShape(1, 1, 2, 8, 8, 2)
    rates = torch.full((6, 2), -12.0, device=device)
    zeros, filters = torch.zeros(2, device=device), torch.randn(shape.channels, 2, device=device)
    given = StateInputs(torch.randn(6, shape.channels, device=device), filters, None, rates, None, zeros, zeros, None)
    slots = slots_of(torch.arange(1), 0, 6, 2, 16).to(device)
    expected = recurrence_reference(given, slots, *planes_of(shape, 1, 16, device), shape)
    error = (op(given, slots, *planes_of(shape, 1, 16, device), shape) - expected).abs().max()
    # Without care, exp(-12) is wrong by almost a hundredth.
    assert error < 1e-4 * expected.abs().max()
