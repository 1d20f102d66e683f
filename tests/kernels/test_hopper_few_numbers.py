"""The kernel for few rows and weights of 16 bits."""

import itertools

import pytest
import torch

from baton_kernels import hopper_few_numbers
from baton_kernels.hopper_few_numbers import few_numbers, few_numbers_candidates
from baton_kernels.hopper_few_rows import ROWS, store_sums, w_row_of
from baton_kernels.kernel_configs import LinearConfig, Product
from baton_kernels.reference.linear import linear_reference

from .closeness import relative_error
from .gluon_on_torch import Launcher, gated
from .hopper import compiled_sizes, on_hopper


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [1024, 1096])
def test_products(inner: int, gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        name: getattr(hopper_few_numbers, name)
        for name in ("_in_order", "_load", "_load_weights", "_load_inputs", "_add_products")
    }
    functions |= {"w_row_of": w_row_of, "store_sums": store_sums}
    run = Launcher(hopper_few_numbers._few_numbers_kernel, functions, hopper_few_numbers)
    monkeypatch.setattr(hopper_few_numbers, "_few_numbers_kernel", run)
    weight, bias = torch.randn(44, inner, dtype=torch.float64), torch.randn(44, dtype=torch.float64)
    for rows, tiles in ((2, (16, 256, 4, 2)), (11, (32, 512, 4, 2)), (8, (16, 1024, 8, 1))):
        x = torch.randn(rows, inner, dtype=torch.float64)
        expected = x @ weight.T + bias
        if gate:
            expected = gated(*expected.chunk(2, dim=1), x.dtype, gate == "gelu_tanh")
        out = torch.empty_like(expected)
        few_numbers(x, weight, bias, gate, LinearConfig(ROWS, *tiles[:2], 1, *tiles[2:], hopper=True), out)
        assert relative_error(out, expected) < 1e-6, (rows, tiles)


def test_candidates_are_for_few_rows_and_small_weights() -> None:
    product = Product(1024, 3072, False)
    assert not few_numbers_candidates(1, product)
    assert not few_numbers_candidates(ROWS + 1, product)
    assert not few_numbers_candidates(ROWS, Product(4096, 4096, False))
    assert {each.block_inner for each in few_numbers_candidates(2, Product(1024, 768, False))} == {256, 512}
    for each in few_numbers_candidates(ROWS, product):
        assert each.hopper
        assert each.block_rows == ROWS
        assert each.block_inner % (32 * each.num_warps) == 0


@pytest.mark.processes
def test_it_compiles_for_each_kind_of_product() -> None:
    sizes = compiled_sizes("few_numbers")
    assert len(sizes) == 13
    assert min(sizes) > 8_000


@on_hopper
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
def test_products_on_hopper(gate: str | None) -> None:
    shapes = [(1024, 2048), (6144, 1024), (1000, 2888), (44, 256)]
    for (outputs, inner), rows in itertools.product(shapes, (2, 7, 8, 13)):
        dtype = torch.float16 if rows == 7 else torch.bfloat16
        weight = torch.randn(outputs, inner, dtype=dtype, device="cuda") * 0.1
        x, bias = (torch.randn(*shape, dtype=dtype, device="cuda") for shape in ((rows, inner), (outputs,)))
        expected = linear_reference(x.double(), weight.double(), bias.double(), gate)
        for config in few_numbers_candidates(ROWS, Product(outputs, inner, gate is not None)):
            out = torch.full_like(expected, float("nan"), dtype=dtype)
            few_numbers(x, weight, bias, gate, config, out)
            assert relative_error(out.double(), expected) < 0.01, (rows, config)
