"""Routing to experts and their products, against the references in float64."""

import pytest
import torch

from baton_kernels.experts import FIXED, ExpertsConfig, route, run_experts, run_experts_fixed
from baton_kernels.reference.experts import experts_reference, route_reference

from .closeness import relative_error


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "count"), [(4, 2), (60, 4), (128, 8), (8, 1)])
def test_route(experts: int, count: int, normalize: bool, device: torch.device) -> None:
    logits = torch.randn(9, experts, device=device)
    weights, chosen = route(logits, count, normalize)
    expected_weights, expected = route_reference(logits, count, normalize)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)


def test_equal_logits_choose_different_experts(device: torch.device) -> None:
    weights, chosen = route(torch.zeros(2, 6, device=device), 3, True)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3, device=device))


def test_logits_that_are_not_finite_choose_experts_that_exist(device: torch.device) -> None:
    logits = torch.zeros(4, 5, device=device)
    logits[0, 2], logits[1], logits[2, 0] = float("nan"), float("-inf"), float("inf")
    weights, chosen = route(logits, 2, True)
    assert ((chosen >= 0) & (chosen < 5)).all()
    assert weights[:3].isnan().any(dim=1).all()
    assert weights[3].isfinite().all()


CONFIGS = [
    ExpertsConfig(1, 4, 32, 2),
    ExpertsConfig(1, 16, 64, 2),
    FIXED,
    ExpertsConfig(16, 32, 16, 2),
    ExpertsConfig(32, 16, 32, 2),
]


@pytest.mark.parametrize("config", [None, *CONFIGS])
@pytest.mark.parametrize(
    ("tokens", "experts", "count", "hidden", "size"),
    [(1, 4, 2, 64, 48), (3, 16, 4, 80, 40), (21, 4, 2, 48, 72), (50, 8, 3, 32, 16)],
)
def test_experts(
    tokens: int, experts: int, count: int, hidden: int, size: int, config: ExpertsConfig | None, device: torch.device
) -> None:
    x = torch.randn(tokens, hidden, device=device)
    gate_up = torch.randn(experts, 2 * size, hidden, device=device) / hidden**0.5
    down = torch.randn(experts, hidden, size, device=device) / size**0.5
    weights, chosen = route_reference(torch.randn(tokens, experts, device=device), count, True)
    # One expert gets no token, and another one many.
    chosen[chosen == experts - 1] = 0
    result = run_experts(x, gate_up, down, weights, chosen, config)
    expected = experts_reference(x.double(), gate_up.double(), down.double(), weights.double(), chosen)
    assert relative_error(result, expected) < 1e-5


def test_a_token_does_not_depend_on_the_others(device: torch.device) -> None:
    x = torch.randn(40, 64, device=device)
    gate_up, down = torch.randn(8, 96, 64, device=device), torch.randn(8, 64, 48, device=device)
    weights, chosen = route_reference(torch.randn(40, 8, device=device), 2, False)
    together = run_experts_fixed(x, gate_up, down, weights, chosen)
    for token in (0, 17, 39):
        one = slice(token, token + 1)
        assert torch.equal(run_experts_fixed(x[one], gate_up, down, weights[one], chosen[one]), together[one])


def test_nan_of_one_token_stays_with_it(device: torch.device) -> None:
    x = torch.randn(24, 32, device=device)
    x[5] = float("nan")
    gate_up, down = torch.randn(4, 32, 32, device=device), torch.randn(4, 32, 16, device=device)
    weights, chosen = route(x[:, :4].contiguous(), 2, True)
    for config in CONFIGS:
        result = run_experts(x, gate_up, down, weights, chosen, config)
        assert result[5].isnan().all()
        assert result[[token for token in range(24) if token != 5]].isfinite().all()
