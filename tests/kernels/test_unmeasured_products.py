"""What is measured of products that no table has: that every candidate computes them, and that the fastest is used."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton_kernels import tuning, unmeasured, unmeasured_products
from baton_kernels.grouped_linear import grouped_linear
from baton_kernels.kernel_configs import LinearConfig, Product
from baton_kernels.linear import linear
from baton_kernels.quantize import quantize_rows
from baton_kernels.reference.grouped_linear import GroupedWeight, grouped_linear_reference
from baton_kernels.reference.linear import linear_reference
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight, scaled_linear_reference
from baton_kernels.scaled_linear import scaled_linear
from baton_kernels.unmeasured_products import Unmeasured, watching

from .closeness import relative_error

OUTPUTS, INNER = 160, 512
FP8, HALF = torch.float8_e4m3fn, torch.float16


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a GPU without tables had four multiprocessors."""
    monkeypatch.setattr(unmeasured_products, "has_rules", lambda inner, device: True)
    monkeypatch.setattr(unmeasured, "_processors", lambda device: 4)
    monkeypatch.setattr(tuning, "_table", lambda *_: {})
    yield
    tuning._learned.clear()
    for cached in (tuning._choose, tuning._measured):
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
    assert each.product == Product(OUTPUTS, INNER, gated)
    return each


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["numbers", "fp8", "fp8 in tiles", "int4"])
def test_every_candidate_computes_the_product(name: str, gated: bool, device: torch.device) -> None:
    case = Case(name, device)
    kind, product, weights = noted(case, gated, device)
    for rows in kind.rows:
        candidates = kind.candidates(weights[0], product, rows)
        assert len(set(candidates)) == len(candidates) > 0
        x = torch.randn(min(rows, 32), INNER, device=device).to(HALF)
        expected = case.expected(x, gated)
        for config in candidates if rows in (1, 16, 128) else ():
            assert relative_error(case.run(x, gated, config), expected) < 0.01, config
    assert not kind.compute(weights[0], product, 3, kind.candidates(weights[0], product, 16)[-1]).any()


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_what_was_learned_is_used_and_not_noted_again(name: str, device: torch.device) -> None:
    case = Case(name, device)
    each = noted(case, False, device)
    few, many = (each.kind.candidates(each.weights[0], each.product, rows)[-1] for rows in (16, 64))
    tuning.learn(each.kind.format, each.product, device, {16: few, 64: many})
    shape = each.kind.format, OUTPUTS, INNER, False, device
    chosen = [tuning.quantized_config(rows, *shape, default=lambda *_: None) for rows in (1, 16, 17, 999)]
    assert chosen == [few, few, many, many]
    assert tuning.compile_first(*shape) == [few, many], "nothing of it is compiled while requests are served"
    with watching() as found:
        case.run(torch.zeros(2, INNER, dtype=HALF, device=device), False)
    assert not found
