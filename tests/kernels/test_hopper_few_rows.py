"""The kernel for few rows and weights of 4 bits. test_hopper_codes.py runs it on Hopper."""

from typing import Any

import pytest
import torch

from baton_kernels import hopper_few_rows
from baton_kernels.hopper_few_rows import ROWS, few_rows_candidates
from baton_kernels.kernel_configs import LinearConfig, Product
from baton_kernels.reference.grouped_linear import (
    GroupedWeight,
    dequantize_grouped_reference,
    pack_four_bits,
    unpack_four_bits,
)

from .closeness import relative_error
from .gluon_on_torch import Launcher, Pointer, Value, gated
from .hopper import compiled_sizes

FUNCTIONS = ("w_row_of", "_in_order", "_halves", "_load_numbers", "_load_step", "_products", "store_sums")


def int4_of(words: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype, beside: str) -> torch.Tensor:
    zeros = zero if beside == "zeros" else torch.full_like(zero, 8)
    codes = unpack_four_bits(words.contiguous())
    return codes.double() - zeros.repeat_interleave(32, dim=1).double()


def numbers_of(words: torch.Tensor, scale: Any, zero: Any, dtype: torch.dtype, kind: str, beside: str) -> torch.Tensor:
    if beside == "factors":
        table = GroupedWeight(kind, words.contiguous(), scale.contiguous(), factors=torch.ones(len(words)) / 256)
    else:
        table = GroupedWeight(kind, words.contiguous(), scale, zero if beside == "zeros" else None)
    return dequantize_grouped_reference(table, torch.float64).as_subclass(Value)


class CodesLauncher(Launcher):
    def _run(self, grid: tuple[int, int], arguments: tuple[Any, ...], **options: Any) -> None:
        x, weight, *others = arguments
        tensors = (Pointer(each) for each in weight[:3])
        weight = weight.__class__(*tensors, *(each.value for each in weight[3:]))
        super()._run(grid, (x, weight, *others), **options)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {name: getattr(hopper_few_rows, name) for name in FUNCTIONS}
    run = CodesLauncher(
        hopper_few_rows._few_rows_kernel, functions, hopper_few_rows, int4_of=int4_of, numbers_of=numbers_of,
        _scales_sums=lambda kind, size: kind == "int4" and size % 128 == 0,
    )  # fmt: skip
    monkeypatch.setattr(hopper_few_rows, "_few_rows_kernel", run)


def make(kind: str, outputs: int, inner: int, group: int, zeros: bool) -> GroupedWeight:
    codes = pack_four_bits(torch.randint(0, 16, (outputs, inner), dtype=torch.uint8))
    if kind == "halves":
        pairs = (torch.rand(outputs, inner // 16) * 448 + 0.01).to(torch.float8_e4m3fn).view(torch.int16)
        return GroupedWeight("e2m1", codes, pairs, factors=torch.rand(outputs) / 1000 + 1e-5)
    shape = outputs, inner // group
    if kind == "e2m1":
        return GroupedWeight(kind, codes, torch.randint(110, 129, shape, dtype=torch.uint8))
    points = torch.randint(0, 17, shape, dtype=torch.uint8) if zeros else None
    return GroupedWeight(kind, codes, (torch.rand(shape) / 8 + 0.01).bfloat16(), points)


@pytest.mark.parametrize(
    ("kind", "group", "zeros", "inner"),
    [
        ("int4", 128, False, 1024), ("int4", 128, True, 1920), ("int4", 256, True, 768), ("int4", 64, True, 1088),
        ("e2m1", 32, False, 1056), ("halves", 32, False, 1024),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_gates", [False, True])
@pytest.mark.usefixtures("launcher")
def test_products(kind: str, group: int, zeros: bool, inner: int, has_gates: bool) -> None:
    weight, bias = make(kind, 44, inner, group, zeros), torch.randn(44, dtype=torch.float64)
    expected_weight = dequantize_grouped_reference(weight, torch.float64)
    for rows, tiles in ((1, (16, 1024, 4, 2)), (11, (32, 512, 4, 2)), (3, (16, 1024, 8, 1))):
        x = torch.randn(rows, inner, dtype=torch.float64)
        expected = x @ expected_weight.T + bias
        if has_gates:
            expected = gated(*expected.chunk(2, dim=1), x.dtype, False)
        config = LinearConfig(1, *tiles[:2], 1, *tiles[2:], hopper=True)
        out = torch.empty_like(expected)
        hopper_few_rows.few_rows_codes(x, weight, bias, has_gates, config, out)
        assert relative_error(out, expected) < 1e-6, (rows, tiles)


def test_candidates_are_for_few_rows_and_have_work_for_all_warps() -> None:
    assert not few_rows_candidates(ROWS + 1, Product(4096, 4096, False))
    assert all(each.hopper and each.block_rows == 1 for each in few_rows_candidates(1, Product(4096, 4096, False)))
    assert {each.block_inner for each in few_rows_candidates(1, Product(4096, 1536, False))} == {1024}
    for each in few_rows_candidates(ROWS, Product(4096, 4096, True)):
        assert each.block_inner % (128 * each.num_warps) == 0


@pytest.mark.processes
def test_it_compiles_for_each_kind_of_product() -> None:
    sizes = compiled_sizes("few_rows")
    assert len(sizes) == 11
    assert min(sizes) > 8_000
