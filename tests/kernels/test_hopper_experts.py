"""Layers of experts on Hopper against float64 where there is such a GPU."""

import dataclasses
import itertools

import pytest
import torch

from baton_common.cores import available_cores
from baton_engine.compilation import compiling_ahead
from baton_kernels.experts import run_experts
from baton_kernels.hopper_experts import candidates, fits_hopper_experts
from baton_kernels.kernel_configs import ExpertLayer, ExpertsConfig, ProductConfig
from baton_kernels.quantized_experts import run_quantized_experts
from baton_kernels.reference.activation import ClampedGate, NoGate
from baton_kernels.reference.experts import ExpertWeights
from baton_kernels.reference.grouped_linear import GroupedWeight, pack_four_bits
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.quantized_experts import ExpertCodes, QuantizedExperts, quantized_experts_reference
from baton_kernels.reference.routing import NOT_OWN
from baton_kernels.reference.scaled_linear import ScaledWeight

from .closeness import relative_error
from .hopper import on_hopper

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = torch.device("cuda", 0)
LAYER = ExpertLayer(3, 9, 384, 192)
SMALL = ExpertsConfig(16, ProductConfig(64, 128, 4, 2), ProductConfig(128, 128, 8, 2), hopper=True)


def weight(kind: str, outputs: int, inner: int) -> ExpertCodes:
    shape = LAYER.experts, outputs, inner
    if kind in ("int4", "e2m1"):
        codes = pack_four_bits(torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE))
        if kind == "e2m1":
            scales = torch.randint(118, 126, (*shape[:2], inner // 32), dtype=torch.uint8, device=DEVICE)
            return GroupedWeight("e2m1", codes, scales)
        groups = *shape[:2], inner // 64
        zeros = torch.randint(0, 17, groups, dtype=torch.uint8, device=DEVICE)
        return GroupedWeight("int4", codes, (torch.rand(groups, device=DEVICE) / 90 + 0.01).to(BF16), zeros)
    numbers = torch.randn(shape, device=DEVICE)
    if kind == "numbers":
        return (numbers / inner**0.5).to(BF16)
    tile = (128, 128) if kind == "fp8 in tiles" else (1, inner)
    scales = (torch.rand(LAYER.experts, -(-outputs // tile[0]), -(-inner // tile[1]), device=DEVICE) + 0.1) / 200
    dtype = torch.int8 if kind == "int8" else FP8
    return ScaledWeight((numbers * 40).clamp(-127, 127).to(dtype), scales, tile)


def layer(kind: str, gated: bool) -> QuantizedExperts:
    units = 2 * LAYER.size if gated else LAYER.size
    gate_up, down = weight(kind, units, LAYER.hidden), weight(kind, LAYER.hidden, LAYER.size)
    rows = RowFormat(down.codes.dtype, 128 if "tiles" in kind else 0) if isinstance(down, ScaledWeight) else None
    if kind != "e2m1":
        gate = {"numbers": "gelu", "fp8": "quick_gelu", "int8": "relu2"}.get(kind, "silu")
        scales = torch.rand(2, LAYER.experts, device=DEVICE) / 40 + 0.005 if "static" in kind else None
        own = gate if gated else NoGate(gate)
        return QuantizedExperts(gate_up, down, gate=own, rows=rows, input_scales=scales)
    sizes = units, LAYER.hidden
    biases = [torch.randn(LAYER.experts, size, dtype=BF16, device=DEVICE) for size in sizes]
    return QuantizedExperts(gate_up, down, *biases, ClampedGate(1.7, 2.0) if gated else NoGate("relu2"))


@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["numbers", "int4", "e2m1", "fp8", "fp8, static", "fp8 in tiles", "int8"])
@pytest.mark.parametrize("gated", [True, False])
def test_layers_of_experts(kind: str, gated: bool) -> None:
    held = layer(kind, gated)
    plain = isinstance(held.gate_up, torch.Tensor)
    plain_held = ExpertWeights(held.gate_up, held.down, gate=held.gate) if plain else None
    wide = dataclasses.replace(
        held,
        **{name: value.double() for name, value in vars(held).items() if isinstance(value, torch.Tensor)},
    )
    for tokens in (1, 8, 40, 700):
        x = torch.randn(tokens, LAYER.hidden, dtype=BF16, device=DEVICE)
        assert fits_hopper_experts(plain_held or held, BF16)
        experts = torch.rand(tokens, LAYER.experts, device=DEVICE).argsort(dim=1)[:, : LAYER.used].int()
        experts[tokens // 2, 0] = NOT_OWN
        experts[tokens // 3] = torch.where(experts[tokens // 3] == 4, NOT_OWN, experts[tokens // 3])
        factors = torch.rand(tokens, LAYER.used, device=DEVICE)
        # Rows are rounded to 8 bits from float32 at most. One that was rounded to 16 bits before gets other codes.
        precise = x.float() if held.rows else x.double()
        expected = quantized_experts_reference(precise, held if held.rows else wide, factors, experts).double()
        bound = 2 * relative_error(quantized_experts_reference(x, held, factors, experts), expected)
        configs = (None, SMALL, *candidates(plain_held or held, tokens, LAYER))

        def run(config: ExpertsConfig | None, x: torch.Tensor = x, experts: torch.Tensor = experts,
                factors: torch.Tensor = factors) -> torch.Tensor:  # fmt: skip
            if plain_held is not None:
                return run_experts(x, plain_held, factors, experts, config)
            return run_quantized_experts(x, held, factors, experts, config)

        with compiling_ahead(available_cores()):
            for config in configs:
                run(config)
        for config, _ in itertools.product(configs, range(2)):
            assert relative_error(run(config), expected) < bound, (kind, tokens, config)
