"""The kernel for few rows, whose operations on tensors torch carries out here. Gluon has no interpreter; its compiler
checks that the layouts of the kernel agree with these operations. test_hopper_codes.py runs the kernel on Hopper."""

from types import FunctionType, SimpleNamespace
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
from .hopper import compiled_sizes


class Value(torch.Tensor):
    """A tensor of a kernel. Its layout does not matter here."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


class Pointer:
    def __init__(self, tensor: torch.Tensor, at: Any = 0) -> None:
        self.tensor, self.at, self.dtype = tensor, at, SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.tensor, self.at + other)


class Gluon:
    """The functions of gluon.language that the kernel calls, and one program's index."""

    int16, int32, int64, uint8, float32 = torch.int16, torch.int32, torch.int64, torch.uint8, torch.float32
    minimum = staticmethod(lambda values, most: values.clamp(max=most))

    def __init__(self, program: tuple[int, int]) -> None:
        self.program_id = program.__getitem__

    def __getattr__(self, name: str) -> Any:
        assert name.endswith("Layout"), name
        return lambda *_: None

    def arange(self, first: int, last: int, layout: None) -> torch.Tensor:
        return torch.arange(first, last).as_subclass(Value)

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: None) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype).as_subclass(Value)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: None) -> torch.Tensor:
        return self.full(shape, 0, dtype, layout)

    def join(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack((one, other), dim=-1)

    def split(self, both: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return both.unbind(-1)

    def sum(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        return values.sum(axis)

    def convert_layout(self, values: torch.Tensor, layout: None, assert_trivial: bool = False) -> torch.Tensor:
        return values

    def load(self, at: Pointer, mask: Any = True, other: float = 0, cache_modifier: str = "") -> torch.Tensor:
        index, mask = torch.broadcast_tensors(at.at, torch.as_tensor(mask))
        # An index outside the tensor is an error only where it is loaded.
        values = at.tensor.flatten()[torch.where(mask, index, 0)]
        return torch.where(mask, values, torch.tensor(other, dtype=values.dtype)).as_subclass(Value)

    def store(self, at: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
        at.tensor.view(-1)[at.at[mask]] = values[mask]


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


def silu_mul(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


class Launcher:
    """Runs the kernel for each of its programs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return lambda *arguments, **options: self.run(grid, arguments, **options)

    def run(self, grid: tuple[int, int], arguments: tuple[Any, ...], SHAPE: Any, BIAS: bool, **options: Any) -> None:
        assert len(set(options) ^ {"num_warps", "maxnreg", "launch_pdl"}) == 0
        x, weight, bias, out, *sizes = arguments
        tensors = (Pointer(each) for each in weight[:3])
        weight = weight.__class__(*tensors, *(each.value for each in weight[3:]))
        for program in ((one, two) for one in range(grid[0]) for two in range(grid[1])):
            names = {**vars(hopper_few_rows), "gl": Gluon(program), "mma_v2": lambda a, b, acc: acc + a @ b.double()}
            names |= {each: getattr(names[each], "value", None) for each in ("_ROWS", "_BLOCK", "_PIECE")}
            names |= {each: lambda *_: None for each in ("let_next_start", "wait_for_inputs")}
            names |= {"int4_of": int4_of, "numbers_of": numbers_of, "silu_mul": silu_mul}
            names["_scales_sums"] = lambda kind, size: kind == "int4" and size % 128 == 0
            names |= {name: lambda *_: None for name in ("_words_layout", "_inputs_layout", "_sums_layout")}
            for name in ("_w_row", "_in_order", "_halves", "_load_numbers", "_load_step", "_products"):
                names[name] = FunctionType(names[name].fn.__code__, names)
            FunctionType(self.kernel.fn.__code__, names)(
                Pointer(x), weight, Pointer(bias), Pointer(out), *sizes, SHAPE, BIAS
            )


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
@pytest.mark.parametrize("gated", [False, True])
def test_products(kind: str, group: int, zeros: bool, inner: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_few_rows, "_few_rows_kernel", Launcher(hopper_few_rows._few_rows_kernel))
    weight, bias = make(kind, 44, inner, group, zeros), torch.randn(44, dtype=torch.float64)
    expected_weight = dequantize_grouped_reference(weight, torch.float64)
    for rows, tiles in ((1, (16, 1024, 4, 2)), (11, (32, 512, 4, 2)), (3, (16, 1024, 8, 1))):
        x = torch.randn(rows, inner, dtype=torch.float64)
        expected = x @ expected_weight.T + bias
        if gated:
            gate, up = expected.chunk(2, dim=1)
            expected = silu_mul(gate, up, x.dtype)
        config = LinearConfig(1, *tiles[:2], 1, *tiles[2:], hopper=True)
        out = torch.empty_like(expected)
        hopper_few_rows.few_rows_codes(x, weight, bias, gated, config, out)
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
