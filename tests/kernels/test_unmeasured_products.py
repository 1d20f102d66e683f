"""What is measured of products that no table has: that every candidate computes them, and that the fastest is used."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton_kernels import tuning, unmeasured
from baton_kernels.experts import run_experts
from baton_kernels.grouped_linear import grouped_linear
from baton_kernels.kernel_configs import ExpertLayer, LinearConfig, Product
from baton_kernels.linear import linear
from baton_kernels.quantize import quantize_rows
from baton_kernels.quantized_experts import run_quantized_experts
from baton_kernels.reference.experts import ExpertWeights, experts_reference
from baton_kernels.reference.grouped_linear import GroupedWeight, grouped_linear_reference
from baton_kernels.reference.linear import linear_reference
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.quantized_experts import QuantizedExperts, quantized_experts_reference
from baton_kernels.reference.routing import NOT_OWN
from baton_kernels.reference.scaled_linear import ScaledWeight, scaled_linear_reference
from baton_kernels.scaled_linear import scaled_linear
from baton_kernels.unmeasured_products import Unmeasured, random_choice, watching

from .closeness import relative_error

OUTPUTS, INNER = 96, 512
LAYER = ExpertLayer(2, 8, 128, 64)
FP8, HALF = torch.float8_e4m3fn, torch.float16


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a GPU without tables had four multiprocessors."""
    monkeypatch.setattr(unmeasured, "_is_hopper_or_newer", lambda device: True)
    monkeypatch.setattr(unmeasured, "_processors", lambda device: 4)
    monkeypatch.setattr(tuning, "_table", lambda *_: {})
    yield
    tuning._learned.clear()
    for cached in (tuning._choose, tuning._measured, tuning._measured_experts):
        cached.cache_clear()


class Case:
    """A product of one format. weight: [OUTPUTS, INNER]."""

    def __init__(self, name: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self.name, self.form = name, RowFormat(FP8, group=128 if "tiles" in name else 0)
        codes = torch.randint(0, 16, (OUTPUTS, INNER // 4), dtype=torch.int16, device=device)
        numbers = torch.randn(OUTPUTS, INNER, device=device)
        self.weight: Any = numbers.to(HALF)
        if name == "int4":
            self.weight = GroupedWeight("int4", codes, torch.full((OUTPUTS, INNER // 64), 0.1, device=device).to(HALF))
        elif "fp8" in name:
            tile = (128, 128) if "tiles" in name else (1, INNER)
            scales = torch.full((-(-OUTPUTS // tile[0]), INNER // tile[1]), 0.1, device=device)
            self.weight = ScaledWeight(numbers.to(FP8), scales, tile)

    def run(self, x: torch.Tensor, gated: bool, config: LinearConfig | None = None) -> torch.Tensor:
        if self.name == "numbers":
            return linear(x, self.weight, gate="silu" if gated else None, config=config)
        if self.name == "int4":
            return grouped_linear(x, self.weight, None, gated, config)
        return scaled_linear(quantize_rows(x, self.form), self.weight, None, HALF, gated, config)

    def expected(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        if self.name == "numbers":
            return linear_reference(x, self.weight, gate="silu" if gated else None)
        if self.name == "int4":
            return grouped_linear_reference(x, self.weight, None, gated)
        return scaled_linear_reference(quantize_rows(x, self.form), self.weight, None, HALF, gated)


def noted(case: Case, gated: bool, device: torch.device) -> Unmeasured:
    with watching() as found:
        case.run(torch.zeros(2, INNER, dtype=HALF, device=device), gated)
    [each] = found.values()
    assert each.shape == Product(OUTPUTS, INNER, gated)
    return each


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["numbers", "fp8", "fp8 in tiles", "int4"])
def test_every_candidate_computes_the_product(name: str, gated: bool, device: torch.device) -> None:
    case = Case(name, device)
    kind, shape, weights = noted(case, gated, device)
    for rows in kind.rows:
        candidates = kind.candidates(weights[0], shape, rows)
        assert len(set(candidates)) == len(candidates) > 0
        x = torch.randn(min(rows, 20), INNER, device=device).to(HALF)
        expected = case.expected(x, gated)
        for config in candidates if rows in (1, 16, 128) else ():
            assert relative_error(case.run(x, gated, config), expected) < 0.01, config
    inputs = kind.inputs(weights[0], shape, 3)
    last = kind.compute(weights[0], shape, inputs, kind.candidates(weights[0], shape, 16)[-1])
    assert last.shape == (3, OUTPUTS // (2 if gated else 1))
    assert relative_error(kind.compute(weights[0], shape, inputs, kind.trusted), last) < 0.01


def make_experts(name: str, device: torch.device) -> ExpertWeights | QuantizedExperts:
    torch.manual_seed(0)
    shapes = (LAYER.experts, 2 * LAYER.size, LAYER.hidden), (LAYER.experts, LAYER.hidden, LAYER.size)
    numbers = [torch.randn(shape, device=device) / 10 for shape in shapes]
    if name == "numbers":
        return ExpertWeights(*(each.to(HALF) for each in numbers))
    if name == "fp8":
        scaled = [ScaledWeight(each.to(FP8), each.new_ones(*each.shape[:2], 1), (1, each.shape[2])) for each in numbers]
        return QuantizedExperts(*scaled, rows=RowFormat(FP8))
    coded = [
        GroupedWeight(
            "int4",
            torch.randint(0, 1 << 15, (*each.shape[:2], each.shape[2] // 4), dtype=torch.int16, device=device),
            torch.full((*each.shape[:2], each.shape[2] // 64), 0.01, device=device).to(HALF),
        )
        for each in numbers
    ]
    return QuantizedExperts(*coded)


@pytest.mark.parametrize("name", ["numbers", "fp8", "int4"])
def test_every_candidate_computes_a_layer_of_experts(name: str, device: torch.device) -> None:
    held = make_experts(name, device)
    run: Any = run_experts if isinstance(held, ExpertWeights) else run_quantized_experts
    reference: Any = experts_reference if isinstance(held, ExpertWeights) else quantized_experts_reference
    x = torch.randn(4, LAYER.hidden, device=device).to(HALF)
    choice = random_choice(4, LAYER, LAYER.experts, device)
    with watching() as found:
        run(x, held, *choice)
    [(kind, shape, weights)] = found.values()
    assert (shape, weights) == (LAYER, [held])
    expected = reference(x, held, *choice)
    # Results of the first product may be rounded to the next number in FP8.
    bound = 0.03 if name == "fp8" else 0.01
    # Few and many rows share candidates.
    for config in dict.fromkeys([*kind.candidates(held, shape, 1), *kind.candidates(held, shape, 128)]):
        assert relative_error(run(x, held, *choice, config), expected) < bound, config
    inputs = kind.inputs(held, shape, 4)
    computed, trusted = (kind.compute(held, shape, inputs, each) for each in (config, kind.trusted))
    assert computed.any()
    assert relative_error(computed, trusted) < bound
    few, many = (kind.candidates(held, shape, rows)[-1] for rows in (8, 512))
    Unmeasured(kind, shape, [held]).learn({8: few, 512: many})
    with watching() as found:
        run(x, held, *choice)
    assert not found
    if name == "numbers":
        chosen = [tuning.experts_config(tokens, *LAYER, 2, device) for tokens in (1, 8, 9, 9999)]
    else:
        chosen = [tuning.quantized_experts_config(tokens, name, *LAYER, device) for tokens in (1, 8, 9, 9999)]
    assert chosen == [few, few, many, many]
    assert torch.equal(run(x, held, *choice), run(x, held, *choice, few))


def test_products_of_the_same_shape_in_other_formats_are_others(device: torch.device) -> None:
    fp8, tiles = Case("fp8", device), Case("fp8 in tiles", device)
    codes = torch.full((OUTPUTS, INNER), 128, dtype=torch.uint8, device=device)
    groups = GroupedWeight("fp8", codes, torch.ones(OUTPUTS, INNER // 128, device=device))
    x = torch.zeros(2, INNER, dtype=HALF, device=device)
    with watching() as found:
        for case in (fp8, tiles):
            case.run(x, False)
        grouped_linear(x, groups)
    assert [format for format, _ in found] == ["fp8", "fp8_tiles", "fp8_groups"]
    next(iter(found.values())).learn({64: LinearConfig(16, 64, 128, 1, 4, 2)})
    assert [tuning.is_known(format, shape, device) for format, shape in found] == [True, False, False]


def test_experts_of_other_ranks_are_left_out(device: torch.device) -> None:
    _, experts = random_choice(64, LAYER, 3, device)
    assert set(experts.unique().tolist()) == {NOT_OWN, 0, 1, 2}


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_what_was_learned_is_used_and_not_noted_again(name: str, device: torch.device) -> None:
    case = Case(name, device)
    each = noted(case, False, device)
    few, many = (each.kind.candidates(each.weights[0], each.shape, rows)[-1] for rows in (16, 64))
    each.learn({16: few, 64: many})
    shape = name, OUTPUTS, INNER, False, device
    chosen = [tuning.quantized_config(rows, *shape, default=lambda *_: None) for rows in (1, 16, 17, 999)]
    assert chosen == [few, few, many, many]
    assert tuning.compile_first(*shape) == [few, many], "nothing of it is compiled while requests are served"
    with watching() as found:
        case.run(torch.zeros(2, INNER, dtype=HALF, device=device), False)
    assert not found
