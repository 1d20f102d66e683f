"""The products of experts against the reference in float64, and the groups of pairs against their definition."""

import dataclasses

import pytest
import torch

from baton_kernels import pair_groups
from baton_kernels.experts import FIXED, run_experts, run_experts_fixed
from baton_kernels.kernel_configs import ExpertsConfig, ProductConfig
from baton_kernels.pair_groups import group_pairs
from baton_kernels.pair_rows import gather_rows, quantize_pairs
from baton_kernels.reference.activation import ClampedGate, ExpertGate, LimitedGate, NoGate
from baton_kernels.reference.experts import ExpertWeights, experts_reference
from baton_kernels.reference.quantize import RowFormat, quantize_rows_reference
from baton_kernels.reference.routing import NOT_OWN, Routing, choose_reference

from .closeness import relative_error


def make_weights(experts: int, hidden: int, size: int, device: torch.device, biased: bool = False) -> ExpertWeights:
    gate_up = torch.randn(experts, 2 * size, hidden, device=device) / hidden**0.5
    down = torch.randn(experts, hidden, size, device=device) / size**0.5
    if not biased:
        return ExpertWeights(gate_up, down)
    biases = torch.randn(experts, 2 * size, device=device), torch.randn(experts, hidden, device=device)
    # A low limit, so that it changes many values.
    return ExpertWeights(gate_up, down, *biases, ClampedGate(limit=0.7))


def wide(held: ExpertWeights) -> ExpertWeights:
    tensors = {name: value for name, value in vars(held).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(held, **{name: value.double() for name, value in tensors.items()})


def choices(tokens: int, experts: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return choose_reference(torch.randn(tokens, experts, device=device), None, Routing(count, normalize=True))


def config(rows: int, outputs: int, inner: int) -> ExpertsConfig:
    return ExpertsConfig(rows, ProductConfig(outputs, inner, 2, 2), ProductConfig(outputs, inner, 2, 2))


CONFIGS = [
    config(1, 8, 32),
    config(1, 16, 64),
    FIXED,
    config(16, 32, 16),
    config(32, 16, 32),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("config", [None, *CONFIGS])
@pytest.mark.parametrize(
    ("tokens", "experts", "count", "hidden", "size"),
    [(1, 4, 2, 64, 48), (11, 24, 3, 80, 40), (21, 4, 2, 48, 24)],
)
def test_experts(
    tokens: int,
    experts: int,
    count: int,
    hidden: int,
    size: int,
    config: ExpertsConfig | None,
    biased: bool,
    device: torch.device,
) -> None:
    x = torch.randn(tokens, hidden, device=device)
    held = make_weights(experts, hidden, size, device, biased)
    weights, chosen = choices(tokens, experts, count, device)
    # One expert gets no token, and another one many.
    chosen[chosen == experts - 1] = 0
    result = run_experts(x, held, weights, chosen, config)
    expected = experts_reference(x.double(), wide(held), weights.double(), chosen)
    assert relative_error(result, expected) < 1e-5


@pytest.mark.parametrize(
    "gate", ["gelu_tanh", "gelu", "quick_gelu", "relu", "relu2", LimitedGate(0.3), LimitedGate(0.3, before=True)]
)
@pytest.mark.parametrize("config", [config(1, 8, 32), FIXED])
def test_experts_with_other_gates(config: ExpertsConfig, gate: ExpertGate, device: torch.device) -> None:
    x, held = torch.randn(9, 48, device=device), make_weights(4, 48, 24, device)
    held = dataclasses.replace(held, gate=gate)
    weights, chosen = choices(9, 4, 2, device)
    expected = experts_reference(x.double(), wide(held), weights.double(), chosen)
    assert relative_error(run_experts(x, held, weights, chosen, config), expected) < 1e-5


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("config", [config(1, 8, 32), config(16, 32, 16)])
def test_experts_without_gates(config: ExpertsConfig, activation: str, biased: bool, device: torch.device) -> None:
    x, held = torch.randn(9, 48, device=device), make_weights(4, 48, 24, device, biased)
    bias = None if held.gate_up_bias is None else held.gate_up_bias[:, :24].contiguous()
    ups = held.gate_up[:, :24].contiguous()
    held = dataclasses.replace(held, gate_up=ups, gate_up_bias=bias, gate=NoGate(activation))
    weights, chosen = choices(9, 4, 2, device)
    chosen[4, 0] = NOT_OWN
    expected = experts_reference(x.double(), wide(held), weights.double(), chosen)
    assert relative_error(run_experts(x, held, weights, chosen, config), expected) < 1e-5
    one = chosen[0].long()
    units = torch.einsum("esh,h->es", ups[one], x[0]) + (0 if bias is None else bias[one])
    units = units.clamp(min=0) ** 2 if activation == "relu2" else units * units.sigmoid()
    results = torch.einsum("ehs,es->eh", held.down[one], units)
    results += 0 if held.down_bias is None else held.down_bias[one]
    assert relative_error(weights[0].to(x.dtype) @ results, expected[0]) < 1e-5


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [3, 20])
def test_parts_of_the_experts_add_up(tokens: int, biased: bool, device: torch.device) -> None:
    """Results of experts that are elsewhere are not read: their memory holds NaN."""
    x, held = torch.randn(tokens, 48, device=device), make_weights(7, 48, 24, device, biased)
    weights, chosen = choices(tokens, 7, 3, device)
    # The first token has no expert in the first part.
    chosen[0] = torch.arange(4, 7)
    expected = experts_reference(x.double(), wide(held), weights.double(), chosen)
    for tiles in (config(1, 8, 32), config(16, 32, 16)):
        total = torch.zeros_like(x)
        for first, end in ((0, 3), (3, 7)):
            tensors = {name: value[first:end] for name, value in vars(held).items() if torch.is_tensor(value)}
            part = dataclasses.replace(held, **tensors, layer_experts=7)
            own = (chosen - first).masked_fill((chosen < first) | (chosen >= end), NOT_OWN)
            result = run_experts(x, part, weights, own, tiles)
            assert relative_error(result + 1, experts_reference(x, part, weights, own) + 1) < 1e-5
            total += result
        assert relative_error(total, expected) < 1e-5


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("pairs", "experts", "least"), [(1, 4, 0), (40, 5, NOT_OWN), (255, 20, 0), (300, 8, NOT_OWN)])
def test_groups(
    pairs: int, experts: int, least: int, rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_groups, "_PAIRS_AT_ONCE", 64)
    monkeypatch.setattr(pair_groups, "_PAIRS_OF_RANGE", 128)
    chosen = torch.randint(least, experts, (pairs, 1), dtype=torch.int32, device=device)
    chosen[chosen == 2] = 1
    groups = group_pairs(chosen, experts, rows)
    expected: list[int] = []
    owners: list[int] = []
    for expert in range(experts):
        mine = torch.where(chosen[:, 0] == expert)[0].tolist()
        mine += [-1] * (-len(mine) % rows)
        expected += mine
        owners += [expert] * (len(mine) // rows)
    assert groups.order[: len(expected)].tolist() == expected
    assert groups.block_experts[: len(owners)].tolist() == owners
    assert (groups.block_experts[len(owners) :] == -1).all()
    # Blocks that are not used may name any pair.
    groups.order[len(expected) :] = 1 << 30
    x = torch.randn(-(-pairs // 3), 70, device=device)
    gathered = gather_rows(x, groups, 3)
    for place, pair in enumerate(expected):
        assert pair < 0 or torch.equal(gathered[place], x[pair // 3])
    real = [place for place, pair in enumerate(expected) if pair >= 0]
    if pairs > 40:  # the interpreter would take long
        return
    for form in (RowFormat(torch.int8), RowFormat(torch.float8_e4m3fn, group=16)):
        exact = quantize_rows_reference(gathered[real], form)
        for rounded in (quantize_pairs(x, groups, form, 3), quantize_pairs(gathered, groups, form)):
            assert torch.equal(rounded.codes[real].float(), exact.codes.float())
            assert torch.equal(rounded.scales[real], exact.scales)
            assert rounded.scales.stride(0) == 1
    scales = torch.rand(experts, device=device) / 40 + 0.005
    of_rows = scales[[owners[place // rows] for place in real]]
    exact = quantize_rows_reference(gathered[real], RowFormat(torch.float8_e4m3fn), of_rows)
    given = quantize_pairs(x, groups, RowFormat(torch.float8_e4m3fn), 3, scales)
    assert torch.equal(given.codes[real].float(), exact.codes.float())
    assert torch.equal(given.scales[real], exact.scales)


def test_a_token_does_not_depend_on_the_others(device: torch.device) -> None:
    x, held = torch.randn(40, 64, device=device), make_weights(8, 64, 48, device)
    weights, chosen = choices(40, 8, 2, device)
    together = run_experts_fixed(x, held, weights, chosen)
    for token in (0, 17, 39):
        one = slice(token, token + 1)
        assert torch.equal(run_experts_fixed(x[one], held, weights[one], chosen[one]), together[one])


@pytest.mark.parametrize("biased", [False, True])
def test_nan_of_one_token_stays_with_it(biased: bool, device: torch.device) -> None:
    x, held = torch.randn(9, 32, device=device), make_weights(4, 32, 16, device, biased)
    for token in (0, 5):
        x[token] = float("nan")
    weights, chosen = choices(9, 4, 2, device)
    for config in CONFIGS:
        result = run_experts(x, held, weights, chosen, config=config)
        assert result[[0, 5]].isnan().all()
        assert result[[token for token in range(9) if token not in (0, 5)]].isfinite().all()
