"""The gated delta rule and Mamba 2 over paged states, against each whole sequence in float64."""

import pytest
import torch
from torch.nn import functional

from baton_kernels.recurrence import recurrence
from baton_kernels.reference.recurrence import StateInputs, StateShape, recurrence_reference

from .test_short_conv import slots_of

BLOCK_SIZE = 4
SHAPES = {
    "two-groups": StateShape(2, 2, 4, 6, 5, 4),
    "shared-keys": StateShape(1, 1, 3, 8, 8, 3),
    "as-many-keys": StateShape(2, 4, 4, 4, 40, 2),
    "no-convolution": StateShape(2, 2, 4, 5, 6, 1),
}
CASES = [
    *((rule, shape) for rule in ("delta", "mamba") for shape in SHAPES),
    ("delta by element", "two-groups"),
    ("delta by element", "shared-keys"),
    ("bounded delta by element", "as-many-keys"),
    ("steady mamba", "no-convolution"),
]


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


@pytest.mark.parametrize("op", [recurrence_reference, recurrence], ids=["reference", "kernel"])
@pytest.mark.parametrize(("rule", "name"), CASES)
def test_chunks_of_sequences_give_the_results_of_each_whole_one(
    op: type, rule: str, name: str, device: torch.device
) -> None:
    shape = SHAPES[name]
    lengths, heads, delta, least = (11, 1, 14), shape.value_heads, "delta" in rule, -3.0 if "bounded" in rule else 0.0
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
    rooms = (-(-count // BLOCK_SIZE) + 1 for count in shape.plane_elements)
    keys, values = (torch.full((20, BLOCK_SIZE, shape.groups, room), float("nan"), device=device) for room in rooms)

    def compute(x: torch.Tensor, rates: torch.Tensor, gates: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        replaced = gates if delta else None
        moves = (None, None) if "steady" in rule else (rates, rate_bias)
        given = StateInputs(x, filters, added[0], moves[0], replaced, log_decay, moves[1], added[1], least=least)
        result: torch.Tensor = op(given, slots, keys, values, shape)
        return result

    results: list[list[torch.Tensor]] = [[], [], []]
    # Each step has a chunk of every sequence that is left, and two tokens of none.
    for ends in ((5, 1, 1), (6, 1, 2), (7, 1, 4), (11, 1, 14)):
        chunks = [(number, sum(map(len, results[number])), end) for number, end in enumerate(ends)]
        chunks = [chunk for chunk in chunks if chunk[1] < chunk[2]]
        rows = torch.cat([wholes[number][first:end] for number, first, end in chunks])
        slots = torch.cat([slots_of(tables[number], first, end, 2) for number, first, end in chunks], dim=1)
        rows = torch.cat([rows, torch.randn_like(wholes[0][:2])])
        x, rates, gates = rows.split(sizes, dim=1)
        slots = functional.pad(slots, (0, 2), value=-1).to(device)
        out = compute(x, rates, gates, slots)
        for number, first, end in chunks:
            results[number].append(out[: end - first])
            out = out[end - first :]
    for result, correct in zip(results, expected, strict=True):
        torch.testing.assert_close(torch.cat(result).double(), correct, rtol=1e-3, atol=1e-4)
    # A complete block has the state at its end, from which a sequence with the same beginning can go on.
    x, rates, gates = wholes[2][8:].split(sizes, dim=1)
    table = torch.cat([tables[2, :2], torch.tensor([19, 18])])
    slots = slots_of(table, 8, 14, 2).to(device)
    out = compute(x, rates, gates, slots)
    torch.testing.assert_close(out.double(), expected[2][8:], rtol=1e-3, atol=1e-4)


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


def test_short_steps_are_precise(device: torch.device) -> None:
    """What Mamba adds to a state is as small as the step is short, and rounding must not lose it."""
    shape = StateShape(1, 1, 2, 8, 8, 2)
    rates = torch.full((6, 2), -12.0, device=device)
    zeros, filters = torch.zeros(2, device=device), torch.randn(shape.channels, 2, device=device)
    given = StateInputs(torch.randn(6, shape.channels, device=device), filters, None, rates, None, zeros, zeros, None)
    slots = torch.stack([torch.arange(6), torch.arange(-1, 5)]).to(device)
    planes = [[torch.zeros(1, 8, 1, -(-count // 8), device=device) for count in shape.plane_elements] for _ in range(2)]
    expected = recurrence_reference(given, slots, *planes[0], shape)
    error = (recurrence(given, slots, *planes[1], shape) - expected).abs().max()
    # Without care, exp(-12) is wrong by almost a hundredth.
    assert error < 1e-4 * expected.abs().max()
