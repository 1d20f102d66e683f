"""Products with 4-bit weights on Hopper against float64 where there is such a GPU."""

import itertools
from typing import NamedTuple

import pytest
import torch

from baton_common.cores import available_cores
from baton_engine.compilation import compiling_ahead
from baton_kernels.grouped_linear import FIXED, grouped_linear, grouped_linear_fixed
from baton_kernels.hopper_codes import has_hopper_kernel
from baton_kernels.hopper_few_rows import few_rows_candidates
from baton_kernels.kernel_configs import LinearConfig, Product
from baton_kernels.reference.grouped_linear import (
    GroupedWeight,
    dequantize_grouped_reference,
    grouped_linear_reference,
    pack_four_bits,
)
from baton_kernels.unmeasured_hopper import CODES, hopper_candidates

from .closeness import relative_error
from .hopper import compiled_sizes, on_hopper

BF16, HALF = torch.bfloat16, torch.float16
DEVICE = torch.device("cuda", 0)
TILES = (
    LinearConfig(16, 64, 64, 1, 4, 2, True), LinearConfig(32, 128, 128, 3, 8, 3, True),
    LinearConfig(256, 128, 64, 1, 8, 5, True),
)  # fmt: skip
# Of the kernel in hopper_few_rows.py.
FEW_ROWS = LinearConfig(1, 16, 512, 1, 4, 4, True), LinearConfig(1, 32, 1024, 1, 8, 2, True)


class Format(NamedTuple):
    """zeros: whether groups have zeros of their own. dtype: of the inputs."""

    kind: str
    group: int
    scales: torch.dtype
    zeros: bool = False
    dtype: torch.dtype = BF16


FORMATS = (
    Format("int4", 64, BF16),
    Format("int4", 128, HALF, True),
    Format("int4", 32, HALF, dtype=HALF),
    Format("int4", 192, torch.float32, True, HALF),
    Format("e2m1", 32, torch.int16),
    Format("e2m1", 32, torch.uint8),
)


def make(form: Format, outputs: int, inner: int, *experts: int) -> GroupedWeight:
    codes = pack_four_bits(torch.randint(0, 16, (*experts, outputs, inner), dtype=torch.uint8, device=DEVICE))
    shape = *experts, outputs, inner // form.group
    if form.scales == torch.int16:
        scales = torch.rand(*experts, outputs, inner // 16, device=DEVICE) * 448 + 0.01
        factors = torch.rand(*experts, outputs, device=DEVICE) / 1000 + 1e-5
        return GroupedWeight("e2m1", codes, scales.to(torch.float8_e4m3fn).view(torch.int16), factors=factors)
    if form.kind == "e2m1":
        return GroupedWeight("e2m1", codes, torch.randint(110, 129, shape, dtype=torch.uint8, device=DEVICE))
    zeros = torch.randint(0, 17, shape, dtype=torch.uint8, device=DEVICE) if form.zeros else None
    return GroupedWeight("int4", codes, (torch.rand(shape, device=DEVICE) / 8 + 0.01).to(form.scales), zeros)


@on_hopper
def test_the_identity_shows_the_numbers_of_the_format() -> None:
    cases = [(make(form, 50, 384), form.dtype) for form in FORMATS]
    identities = {dtype: torch.eye(384, dtype=dtype, device=DEVICE) for dtype in (BF16, HALF)}
    with compiling_ahead(available_cores()):
        for (weight, dtype), config in itertools.product(cases, (*TILES, *FEW_ROWS)):
            grouped_linear(identities[dtype], weight, config=config)
    for (weight, dtype), config in itertools.product(cases, (*TILES, *FEW_ROWS)):
        assert has_hopper_kernel(weight, dtype)
        for _ in range(2):  # the second time shows whether the first has left its counters at zero
            ours = grouped_linear(identities[dtype], weight, config=config).T
            expected = dequantize_grouped_reference(weight, dtype)
            if weight.scales.dtype in (torch.float32, torch.int16):
                assert relative_error(ours, expected.double()) < 1e-3
            else:
                assert torch.equal(ours, expected), (weight.kind, weight.scales.dtype, dtype, config)


Case = tuple[torch.Tensor, GroupedWeight, bool, tuple[LinearConfig, ...]]


def check(cases: list[Case]) -> None:
    """Check products with a bias in some configurations. Each case: inputs, weight, whether it has gates, and these."""
    with compiling_ahead(available_cores()):
        for x, weight, gated, configs in cases:
            for config in configs:
                grouped_linear(x, weight, x.new_zeros(len(weight.codes)), gated, config)
    for x, weight, gated, configs in cases:
        bias = torch.randn(len(weight.codes), dtype=x.dtype, device=DEVICE)
        expected = x.double() @ dequantize_grouped_reference(weight, torch.float64).T + bias.double()
        if gated:
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        bound = 2 * relative_error(grouped_linear_reference(x, weight, bias, gated), expected)
        for config in configs:
            ours = grouped_linear(x, weight, bias, gated, config)
            assert relative_error(ours, expected) < bound, (weight.kind, weight.scales.dtype, x.shape, gated, config)


@on_hopper
def test_sizes_that_fill_no_tile() -> None:
    cases: list[Case] = []
    for form, gated, rows in itertools.product(FORMATS, (False, True), (1, 20, 300)):
        x = torch.randn(rows, 192, dtype=form.dtype, device=DEVICE)
        cases.append((x, make(form, 100, 192), gated, (FIXED, *TILES, *FEW_ROWS)))
    check(cases)


@on_hopper
def test_products_with_every_candidate() -> None:
    cases: list[Case] = []
    for (form, gated), rows in itertools.product(((FORMATS[0], False), (FORMATS[-1], True)), (1, 20, 50, 130, 300)):
        x = torch.randn(rows, 1152, dtype=BF16, device=DEVICE)
        shape = Product(600, 1152, gated)
        tiles = [*few_rows_candidates(rows, shape), *hopper_candidates(CODES, rows, shape, DEVICE)]
        cases.append((x, make(form, 600, 1152), gated, tuple(tiles)))
    check(cases)


@on_hopper
def test_fixed_products_do_not_depend_on_the_rows_around() -> None:
    weight, x = make(Format("int4", 128, BF16, True), 300, 640), torch.randn(90, 640, dtype=BF16, device=DEVICE)
    together = grouped_linear_fixed(x, weight)
    assert torch.equal(grouped_linear_fixed(x[66:70].contiguous(), weight), together[66:70])


def test_other_weights_and_other_devices_have_other_kernels() -> None:
    codes, scales = torch.zeros(4, 16, dtype=torch.int16), torch.ones(4, 2)
    assert not any(has_hopper_kernel(GroupedWeight(kind, codes, scales), BF16) for kind in ("int4", "e2m1", "table"))


@pytest.mark.processes
def test_it_compiles_for_each_kind_of_product() -> None:
    sizes = compiled_sizes("codes")
    assert len(sizes) == 9
    assert min(sizes) > 10_000
