"""Experts with quantized weights against float64, in small batches and in blocks."""

import pytest
import torch

from baton_kernels.kernel_configs import ExpertsConfig, ProductConfig
from baton_kernels.quantized_experts import run_quantized_experts, run_quantized_experts_fixed
from baton_kernels.reference.activation import ClampedGate, NoGate
from baton_kernels.reference.grouped_linear import GroupedWeight, pack_four_bits
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.quantized_experts import QuantizedExperts, quantized_experts_reference
from baton_kernels.reference.routing import NOT_OWN
from baton_kernels.reference.scaled_linear import ScaledWeight

from .closeness import relative_error

EXPERTS, HIDDEN, SIZE = 5, 64, 96
CONFIG = ExpertsConfig(16, ProductConfig(32, 64, 4, 2), ProductConfig(32, 64, 4, 2))
BY_ROWS = ExpertsConfig(1, ProductConfig(8, 32, 4, 1), ProductConfig(16, 64, 4, 1))


def grouped(kind: str, outputs: int, inputs: int, device: torch.device) -> GroupedWeight:
    codes = torch.randint(0, 16, (EXPERTS, outputs, inputs), dtype=torch.uint8, device=device)
    shape = EXPERTS, outputs, inputs // 32
    if kind == "halves":
        scales = torch.rand(EXPERTS, outputs, inputs // 16, device=device) * 400 + 1
        factors = torch.rand(EXPERTS, outputs, device=device) / 4000
        pairs = scales.to(torch.float8_e4m3fn).view(torch.int16)
        return GroupedWeight("e2m1", pack_four_bits(codes), pairs, factors=factors)
    if kind == "e2m1":
        scales = torch.randint(121, 125, shape, dtype=torch.uint8, device=device)
        return GroupedWeight(kind, pack_four_bits(codes), scales)
    zeros = torch.randint(4, 12, shape, dtype=torch.uint8, device=device)
    return GroupedWeight(kind, pack_four_bits(codes), torch.rand(shape, device=device).half() / 16, zeros)


def scaled(
    dtype: torch.dtype, tile: tuple[int, int] | None, outputs: int, inputs: int, device: torch.device
) -> ScaledWeight:
    codes = (torch.randn(EXPERTS, outputs, inputs, device=device) * 40).clamp(-127, 127).to(dtype)
    rows, columns = tile or (1, inputs)
    scales = (torch.rand(EXPERTS, outputs // rows, inputs // columns, device=device) + 0.1) / 200
    return ScaledWeight(codes, scales, (rows, columns))


def make(kind: str, device: torch.device, gated: bool = True) -> QuantizedExperts:
    inner = 2 * SIZE if gated else SIZE
    biases = [torch.randn(EXPERTS, outputs, device=device) for outputs in (inner, HIDDEN)]
    unbiased = {"int4": "gelu_tanh", "fp8 in tiles": "silu"}
    gate = unbiased.get(kind, ClampedGate(1.7, 2.0)) if gated else NoGate("relu2")
    rest = *((None, None) if kind in unbiased else biases), gate
    if kind in ("int4", "e2m1", "halves"):
        return QuantizedExperts(grouped(kind, inner, HIDDEN, device), grouped(kind, HIDDEN, SIZE, device), *rest)
    dtype = torch.int8 if "int8" in kind else torch.float8_e4m3fn
    tile = (16, 32) if kind == "fp8 in tiles" else None
    pair = [scaled(dtype, tile, inner, HIDDEN, device), scaled(dtype, tile, HIDDEN, SIZE, device)]
    # With the default, 127.5, the largest number of a row lies between two codes, and either may be right.
    rows = RowFormat(dtype, group=32 if tile else 0, steps=127.0)
    scales = torch.rand(2, EXPERTS, device=device) / 40 + 0.005 if "static" in kind else None
    return QuantizedExperts(*pair, *rest, rows=rows, input_scales=scales)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "kind", ["int4", "e2m1", "halves", "fp8", "fp8 in tiles", "int8", "fp8, static", "int8, static"]
)
def test_quantized_experts(kind: str, gated: bool, device: torch.device) -> None:
    held = make(kind, device, gated)
    for tokens in (1, 9):
        x = torch.randn(tokens, HIDDEN, device=device)
        experts = torch.rand(tokens, EXPERTS, device=device).argsort(dim=1)[:, :2].int()
        weights = torch.rand(tokens, 2, device=device)
        # Where rows are rounded to 8 bits, float64 would round other numbers.
        biases = (None if each is None else each.double() for each in (held.gate_up_bias, held.down_bias))
        wide = held if held.rows else QuantizedExperts(held.gate_up, held.down, *biases, held.gate)
        exact = quantized_experts_reference(x if held.rows else x.double(), wide, weights, experts)
        for config in (CONFIG, BY_ROWS) if held.rows else (CONFIG,):
            ours = run_quantized_experts(x, held, weights, experts, config)
            # A number that lies between two codes can get either.
            assert relative_error(ours, exact) < (5e-3 if held.rows else 1e-5)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["e2m1", "fp8 in tiles", "fp8, static"])
def test_pairs_of_experts_elsewhere_add_nothing(kind: str, device: torch.device) -> None:
    held = make(kind, device)
    x = torch.randn(12, HIDDEN, device=device)
    experts = torch.rand(12, EXPERTS, device=device).argsort(dim=1)[:, :2].int()
    experts[3] = NOT_OWN
    experts[5, 0] = NOT_OWN
    weights = torch.rand(12, 2, device=device)
    for config in (CONFIG, BY_ROWS) if held.rows else (CONFIG,):
        ours = run_quantized_experts(x, held, weights, experts, config)
        assert relative_error(ours, quantized_experts_reference(x, held, weights, experts)) < 5e-3
        assert not ours[3].any()


@pytest.mark.usefixtures("same_sum_anywhere")
def test_fixed_products_do_not_depend_on_the_other_tokens(device: torch.device) -> None:
    held = make("int4", device)
    x, weights = torch.randn(20, HIDDEN, device=device), torch.rand(20, 2, device=device)
    experts = torch.rand(20, EXPERTS, device=device).argsort(dim=1)[:, :2].int()
    together = run_quantized_experts_fixed(x, held, weights, experts)
    alone = run_quantized_experts_fixed(x[7:8].contiguous(), held, weights[7:8].contiguous(), experts[7:8].contiguous())
    assert torch.equal(together[7:8], alone)
