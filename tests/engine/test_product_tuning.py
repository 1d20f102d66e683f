"""Products that no table has are measured at start, and the fastest way is used from then on."""

import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch

from baton_engine import product_tuning
from baton_engine.product_tuning import _agree, tune_products
from baton_kernels import linear as linear_kernels
from baton_kernels import tuning, unmeasured_products
from baton_kernels.kernel_configs import LinearConfig, Product
from baton_kernels.linear import linear
from baton_kernels.reference.linear import linear_reference
from baton_kernels.tuning import linear_config
from baton_kernels.unmeasured_products import Unmeasured, watching

CPU = torch.device("cpu")
PRODUCT = Product(64, 32, False)
CANDIDATES = [LinearConfig(16, 32, 32, 1, 4, 2), LinearConfig(16, 16, 16, 2, 4, 2), None]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A table with one product, on a device for which there are rules."""
    table = {"32x64": {"64": list(CANDIDATES[0] or ())}}
    monkeypatch.setattr(tuning, "_table", lambda *_: table)
    monkeypatch.setattr(unmeasured_products, "has_rules", lambda inner, device: True)
    monkeypatch.setattr(tuning, "unmeasured_linear", lambda *_: CANDIDATES[0])
    monkeypatch.setattr(product_tuning, "compiling_ahead", lambda cores: contextlib.nullcontext())
    monkeypatch.setattr(linear_kernels, "linear_candidates", lambda *_: CANDIDATES)
    for cached in (tuning._choose, tuning._measured):
        cached.cache_clear()
    yield
    tuning._learned.clear()
    for cached in (tuning._choose, tuning._measured):
        cached.cache_clear()


def unmeasured(weights: list[torch.Tensor]) -> Collection[Unmeasured]:
    """Return what is noted when a product is computed with each of these weights."""
    with watching() as found:
        for weight in weights:
            linear(weight.new_zeros(1, weight.shape[1]), weight)
    return found.values()


def clock(times: list[float]) -> Callable[[Callable[[], object], int], float]:
    """Return a clock that runs the work and returns these times in turn."""
    left = iter(times)

    def seconds(run: Callable[[], object], repeats: int) -> float:
        run()
        return next(left)

    return seconds


def test_what_is_in_no_table_is_watched_once() -> None:
    x = torch.zeros(2, 64, dtype=torch.float16)
    known, *new = (x.new_zeros(outputs, 64) for outputs in (32, 16, 16))
    with watching() as found:
        for weight in (known, *new, *new):
            linear(x, weight)
        linear(x, x.new_zeros(48, 64), config=CANDIDATES[0])
    [each] = found.values()
    assert each.shape == Product(16, 64, False)
    assert [weight is other for weight, other in zip(each.weights, new, strict=True)] == [True, True]
    tuning.learn("", Product(16, 64, False), CPU, {64: None})
    with watching() as found:
        linear(x, new[0])
    assert not found


def test_the_fastest_candidate_of_each_number_of_rows_is_used() -> None:
    weights = [torch.randn(64, 32, generator=torch.Generator().manual_seed(n)).half() for n in range(3)]
    assert linear_config(2, *PRODUCT, CPU) == CANDIDATES[0]
    # Two rounds of the three candidates for each number of rows, of which the faster one counts. For 128 rows there is
    # only cuBLAS here.
    times = [[3, 9, 9, 4, 2, 9], [9, 7, 3, 9, 7, 3], [1, 2, 3, 1, 2, 3], [9, 8, 7, 9, 8, 7], [5, 4, 6, 5, 6, 6], [1, 1]]
    tune_products(unmeasured(weights), clock(list(itertools.chain(*times))))
    chosen = [linear_config(rows, *PRODUCT, CPU) for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65)]
    one, few, some, more, many = (CANDIDATES[each] for each in (1, 2, 0, 2, 1))
    assert chosen == [one, few, few, some, some, more, more, many, many, None]
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(9)).half()
    assert torch.allclose(linear(x, weights[0]), linear_reference(x, weights[0]), atol=0.02)


def test_rules_stay_where_a_device_refuses_a_candidate(caplog: pytest.LogCaptureFixture) -> None:
    def seconds(run: Callable[[], object], repeats: int) -> float:
        raise RuntimeError("out of resource")

    with caplog.at_level(logging.WARNING):
        tune_products(unmeasured([torch.zeros(64, 32).half()]), seconds)
    assert "products are not measured: out of resource" in caplog.text
    assert linear_config(2, *PRODUCT, CPU) == CANDIDATES[0]


def test_a_candidate_whose_results_are_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One element of thousands is enough."""
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(5)).half()
    products = unmeasured([weight])
    wrong, right = CANDIDATES[0], CANDIDATES[1]
    original = linear_kernels.linear

    def broken(*arguments: Any, config: LinearConfig | None = None, **options: Any) -> torch.Tensor:
        result = original(*arguments, config=config, **options)
        if config == wrong:
            result[-1, 7] += 3 * result.float().square().mean().sqrt()
        return result

    monkeypatch.setattr(linear_kernels, "linear", broken)
    monkeypatch.setattr(linear_kernels, "linear_candidates", lambda *_: [wrong, right])
    tune_products(products, lambda run, repeats: 1.0)
    assert [linear_config(rows, *PRODUCT, CPU) for rows in (1, 16, 64)] == [right] * 3
    assert f"results for 16 rows are wrong: {wrong}" in caplog.text
    tuning._learned.clear()
    monkeypatch.setattr(linear_kernels, "linear_candidates", lambda *_: [wrong])
    tune_products(products, lambda run, repeats: 1.0)
    assert [linear_config(rows, *PRODUCT, CPU) for rows in (1, 16, 64)] == [None] * 3, "the product that is trusted"


def test_large_results_may_be_rounded_accordingly() -> None:
    """The results of a product with gates in bfloat16, one of which is 100 times the root mean square."""
    expected = torch.randn(4096, 4, generator=torch.Generator().manual_seed(6))
    expected[3, 2:] = torch.tensor([0.0, 100.0])
    rounded = expected * (1 + 2**-8)
    assert _agree(rounded, expected)
    rounded[3, 2] = 0.4
    assert not _agree(rounded, expected)


def test_weights_that_are_not_finite_are_measured(caplog: pytest.LogCaptureFixture) -> None:
    tune_products(unmeasured([torch.full((64, 32), float("nan")).half()]), lambda run, repeats: 1.0)
    assert "wrong" not in caplog.text
    assert linear_config(2, *PRODUCT, CPU) == CANDIDATES[0]
