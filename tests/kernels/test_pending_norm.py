"""Norms that the kernels after them compute, against float64 and against norms in kernels of their own."""

import pytest
import torch

from baton_kernels import norm as norm_kernels
from baton_kernels.kernel_configs import LinearConfig
from baton_kernels.linear import linear
from baton_kernels.norm import add_rms_norm, norm_at_once, pending_norm, quantize_norm
from baton_kernels.quantize import quantize_rows
from baton_kernels.reference.linear import linear_reference
from baton_kernels.reference.norm import PendingNorm, add_rms_norm_reference
from baton_kernels.reference.routing import Routing, route_reference
from baton_kernels.routing import route

from .closeness import poisoned, relative_error
from .test_linear import CONFIGS
from .test_quantize import FORMATS, same

EPS = 1e-5


def pending(
    size: int, device: torch.device, residual: bool = True, offset: bool = False, dtype: torch.dtype = torch.float16
) -> PendingNorm:
    """Return the norm of a random row. offset: its weight is 1 + a number, in float32, as Gemma has it."""
    x, added = torch.randn(1, size, device=device).to(dtype), torch.randn(1, size, device=device).to(dtype)
    weight = 1 + torch.randn(size, device=device) / 4 if offset else torch.randn(size, device=device).to(dtype)
    return PendingNorm(x, added if residual else None, weight, EPS, poisoned(1, size, like=x) if residual else x)


def exact(norm: PendingNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum with the residual, as it is rounded, and its norm in float64."""
    total = norm.x if norm.residual is None else norm.x + norm.residual
    scale = (total.double().square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return total, total.double() / scale * norm.weight.double()


@pytest.mark.parametrize("size", [64, 77, 300])
@pytest.mark.parametrize(("residual", "offset"), [(True, False), (False, False), (True, True)])
def test_product(size: int, residual: bool, offset: bool, device: torch.device) -> None:
    norm = pending(size, device, residual, offset)
    weight = (torch.randn(50, size, device=device) * size**-0.5).half()
    bias = torch.randn(50, device=device).half()
    total, normed = exact(norm)
    out = linear(norm, weight, bias, config=LinearConfig(1, 4, 64, 1, 4, 1))
    assert torch.equal(norm.total, total)
    expected = normed @ weight.double().T + bias.double()
    # Sums of `size` products in float32, and of as many squares, of which the scale is the root; then one rounding.
    terms = normed.abs() @ weight.double().abs().T + bias.double().abs()
    bound = (2 * size + 16) * 2**-24 * terms + 2**-11 * expected.abs() + 2**-25
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates_of_a_product(gate: str, device: torch.device) -> None:
    norm = pending(100, device, dtype=torch.float32)
    weight = torch.randn(34, 100, device=device) / 10
    expected = linear_reference(exact(norm)[1], weight.double(), gate=gate)
    assert relative_error(linear(norm, weight, None, gate, config=CONFIGS["one row"]), expected) < 1e-5


@pytest.mark.parametrize("config", [CONFIGS["parts"], None])
def test_products_that_compute_no_norms(config: LinearConfig | None, device: torch.device) -> None:
    norm, weight = pending(96, device, dtype=torch.float32), torch.randn(48, 96, device=device)
    total, normed = exact(norm)
    assert relative_error(linear(norm, weight, config=config), normed @ weight.double().T) < 1e-5
    assert torch.equal(norm.total, total)


def test_a_product_of_a_row_that_is_not_finite(device: torch.device) -> None:
    norm, weight = pending(100, device), torch.randn(20, 100, device=device).half()
    norm.x[0, 70] = float("nan")
    assert linear(norm, weight, config=CONFIGS["one row"]).isnan().all()
    assert norm.total.isnan().sum() == 1


@pytest.mark.parametrize(("size", "residual", "offset"), [(96, True, False), (77, False, True), (2500, True, False)])
def test_router(size: int, residual: bool, offset: bool, device: torch.device) -> None:
    norm = pending(size, device, residual, offset)
    weight, correction = torch.randn(24, size, device=device).half(), torch.randn(24, device=device)
    routing = Routing(4, sigmoid=True, normalize=True)
    rows, weights, chosen = route(norm, weight, None, correction, routing)
    total, normed = exact(norm)
    assert torch.equal(norm.total, total)
    # The normed value is rounded, and the product with the norm's weight, too.
    torch.testing.assert_close(rows.double(), normed, rtol=2**-10 + 2**-18, atol=2**-24)
    _, expected_weights, expected = route_reference(rows, weight, None, correction, routing)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)
    _, many_weights, many = route(norm, weight, None, correction, routing, config=LinearConfig(16, 16, 128, 4, 4, 2))
    assert torch.equal(many, expected)
    torch.testing.assert_close(many_weights, weights, rtol=1e-2, atol=1e-3)


def test_two_norms_at_once_are_those_of_two_kernels(device: torch.device) -> None:
    x, residual = torch.randn(5, 100, device=device), torch.randn(5, 100, device=device)
    first, second = torch.randn(100, device=device), 1 + torch.randn(100, device=device) / 4
    x[2, 7] = float("nan")
    later, theirs = PendingNorm(x, None, first, EPS, x), residual.clone()
    expected = add_rms_norm(add_rms_norm(x, None, first, EPS), theirs, second, 1e-6)
    for function in (add_rms_norm, add_rms_norm_reference):
        ours = residual.clone()
        torch.testing.assert_close(function(later, ours, second, 1e-6), expected, equal_nan=True)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    form = FORMATS["fp8"]
    assert same(quantize_norm(later, residual, second, 1e-6, form), quantize_rows(expected, form))


def test_which_norms_are_left_to_the_next_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 64, device=device), torch.randn(64, device=device)
    row = x[:1]

    def left(x: torch.Tensor | PendingNorm, most: int = 64) -> bool:
        residual = torch.ones(row.shape, device=device) if isinstance(x, PendingNorm) else torch.ones_like(x)
        before = residual.clone()
        normed, total = pending_norm(x, residual, weight, EPS, most)
        assert torch.equal(residual, before) == isinstance(normed, PendingNorm)
        assert (total is residual) != isinstance(normed, PendingNorm)
        return isinstance(normed, PendingNorm)

    assert left(row)
    assert not left(x), "each program would compute the norms of many rows"
    assert not left(row, most=63)
    assert not left(PendingNorm(row, None, weight, EPS, row)), "a product computes one norm"
    normed, total = pending_norm(row, None, weight, EPS, 64)
    assert isinstance(normed, PendingNorm)
    assert normed.total is total is row
    assert isinstance(norm_at_once(row, None, weight, EPS, 64)[0], torch.Tensor)
    monkeypatch.setattr(norm_kernels, "MOST_NORMED_ROWS", 0)
    assert not left(row)
