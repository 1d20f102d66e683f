"""Products with weights in groups of 4 or 8 bits against float64, for shapes that fill no tile."""

import pytest
import torch

from baton_kernels.grouped_linear import dequantize_grouped, grouped_linear, grouped_linear_fixed
from baton_kernels.kernel_configs import LinearConfig
from baton_kernels.reference.grouped_linear import (
    FOUR_BITS,
    MOST_EXPONENT,
    GroupedWeight,
    dequantize_grouped_reference,
    grouped_linear_reference,
    held_exponents,
    pack_four_bits,
    unpack_four_bits,
)

from .closeness import relative_error

CONFIGS = {
    "one row": LinearConfig(1, 32, 64, 1, 4, 1),
    "tiles": LinearConfig(16, 64, 64, 1, 4, 2),
    "parts": LinearConfig(16, 64, 64, 2, 4, 2),
}
INNER = 192


def make(kind: str, outputs: int, group: int, device: torch.device, zeros: bool = False) -> GroupedWeight:
    """kind: of a GroupedWeight, or "halves" for e2m1 with scales of halves of groups."""
    if kind == "halves":
        scales = torch.rand(outputs, INNER // 16, device=device) ** 4 * 448
        scales[:2] = 2.0**-9  # the smallest number above 0
        factors = torch.rand(outputs, device=device) / 1000 + 1e-5
        codes = torch.randint(-32768, 32768, (outputs, INNER // 4), dtype=torch.int16, device=device)
        pairs = scales.to(torch.float8_e4m3fn).view(torch.int16)
        return GroupedWeight("e2m1", codes, pairs, factors=factors)
    codes = torch.randint(0, 16 if kind in FOUR_BITS else 256, (outputs, INNER), dtype=torch.uint8, device=device)
    if kind == "fp8":
        codes[(codes & 127) == 127] = 0  # NaN
    if kind in FOUR_BITS:
        codes = pack_four_bits(codes)
    shape = outputs, INNER // group
    scales = torch.rand(shape, device=device).half() + 0.1
    if kind == "e2m1":
        scales = torch.randint(118, MOST_EXPONENT + 1, shape, dtype=torch.uint8, device=device)
    points = torch.randint(0, 17, shape, dtype=torch.uint8, device=device) if zeros else None
    table = torch.randn(16, device=device) if kind == "table" else None
    return GroupedWeight(kind, codes, scales, points, table)


def test_four_bits_are_packed_and_unpacked(device: torch.device) -> None:
    codes = torch.randint(0, 16, (3, 96), dtype=torch.uint8, device=device)
    assert torch.equal(unpack_four_bits(pack_four_bits(codes)), codes)
    # Word 9 is the second one of the second block.
    word = sum(int(codes[1, 33 + 8 * at]) << 4 * at for at in range(4))
    assert pack_four_bits(codes)[1, 9].item() & 0xFFFF == word


@pytest.mark.parametrize(
    ("kind", "group", "zeros", "name"),
    [
        *(("int4", 64, True, name) for name in CONFIGS),
        *(("e2m1", 32, False, name) for name in CONFIGS),
        *(("halves", 32, False, name) for name in CONFIGS),
        *(("int8", 32, False, name) for name in ("one row", "tiles")),
        *(("fp8", 192, False, name) for name in ("one row", "tiles")),
        ("int4", 192, False, "parts"),
        ("table", 96, False, "tiles"),
    ],
)
def test_products(kind: str, group: int, zeros: bool, name: str, device: torch.device) -> None:
    weight = make(kind, 50, group, device, zeros)
    exact = dequantize_grouped_reference(weight, torch.float64)
    assert torch.equal(dequantize_grouped(weight, torch.float32), dequantize_grouped_reference(weight, torch.float32))
    bias = torch.randn(50, device=device)
    for rows in (2,) if name == "one row" else (20,):
        x = torch.randn(rows, INNER, device=device)
        expected = x.double() @ exact.T + bias.double()
        for _ in range(2):  # the second time shows whether the first has left its counters at zero
            assert relative_error(grouped_linear(x, weight, bias, config=CONFIGS[name]), expected) < 1e-6
        assert relative_error(grouped_linear_reference(x, weight, bias), expected) < 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_gated_products(name: str, device: torch.device) -> None:
    weight, bias = make("int4", 60, 64, device, zeros=True), torch.randn(60, device=device) * 30
    for config, rows in ((CONFIGS[name], 3), (None, 130)):
        x = torch.randn(rows, INNER, device=device)
        gate, up = (x.double() @ dequantize_grouped_reference(weight, torch.float64).T + bias.double()).chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
        assert relative_error(grouped_linear(x, weight, bias, True, config), expected) < 1e-6
        assert relative_error(grouped_linear_reference(x, weight, bias, True), expected) < 1e-6


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("int4", 64), ("int4", 192), ("e2m1", 32), ("halves", 32)])
def test_16_bits_are_multiplied_with_the_numbers_of_the_format(
    kind: str, group: int, scales: torch.dtype, device: torch.device
) -> None:
    """The identity as the input shows the numbers, which a GPU decodes two at once. The interpreter has no products of
    bfloat16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    weight = make(kind, 50, group, device, zeros=kind == "int4")
    if kind == "int4":
        weight = weight._replace(scales=weight.scales.to(scales))
    expected = dequantize_grouped_reference(weight, dtype)
    # The interpreter is slow. Every fifth number is one of each place in a packed word, and some of each group.
    some = slice(None, None, 1 if device.type == "cuda" else 5)
    x = torch.eye(INNER, dtype=dtype, device=device)[some].contiguous()
    for name in ("tiles", "parts"):
        ours = grouped_linear(x, weight, config=CONFIGS[name]).T
        assert torch.equal(ours, expected[:, some])


def test_large_batches(device: torch.device) -> None:
    weight, x = make("int4", 50, 64, device), torch.randn(130, INNER, device=device)
    expected = x.double() @ dequantize_grouped_reference(weight, torch.float64).T
    assert relative_error(grouped_linear(x, weight), expected) < 1e-6


def test_the_ends_of_the_exponents_range(device: torch.device) -> None:
    scales = torch.tensor([[0, 1, 127, 254, 255, 130]], dtype=torch.uint8, device=device)
    weight = GroupedWeight("e2m1", torch.full((1, 48), 0x2222, dtype=torch.int16, device=device), scales)
    values = dequantize_grouped_reference(weight, torch.float32)[0, ::32].tolist()
    assert values[:4] == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert values[4] != values[4]
    assert values[5] == 8.0
    assert held_exponents(scales[:, :3]).dtype == torch.uint8
    for held in (weight, weight._replace(scales=held_exponents(scales))):
        ours = dequantize_grouped(held, torch.float32)[0, ::32]
        assert torch.equal(ours.nan_to_num(7), torch.tensor(values, device=device).nan_to_num(7))


@pytest.mark.usefixtures("same_sum_anywhere")
def test_fixed_products_do_not_depend_on_the_rows_around(device: torch.device) -> None:
    weight = make("int4", 40, 64, device)
    x = torch.randn(70, INNER, device=device)
    together = grouped_linear_fixed(x, weight)
    assert torch.equal(grouped_linear_fixed(x[66:70].contiguous(), weight), together[66:70])
