"""The formats of weights whose products are tuned: their tables, random weights, and candidates."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import triton

from baton_kernels import grouped_linear, scaled_linear
from baton_kernels.activation import gate_mul
from baton_kernels.hopper_few_numbers import few_numbers_candidates
from baton_kernels.hopper_products import is_hopper
from baton_kernels.kernel_configs import LinearConfig, Product
from baton_kernels.linear import by_cublas, linear
from baton_kernels.quantize import quantize_rows
from baton_kernels.reference.grouped_linear import GroupedWeight
from baton_kernels.reference.quantize import QuantizedRows, RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight
from baton_kernels.unmeasured_hopper import DENSE, hopper_candidates

SHARED_MEMORY = 220 << 10
WEIGHT_BYTES = 512 << 20  # several times the L2 cache of any current GPU
_GROUP = 64  # columns that share a scale in INT4
DEVICE = "cuda"


class Format(ABC):
    """A format of weights.

    table: the prefix of its table's file name. bytes: of a weight. rows: the numbers of rows that are tuned. gates:
    gated products compute the gate for any number of rows, otherwise only for few. form: how rows are rounded; None =
    not at all. tile: outputs and columns that share a scale; None = another form of scales.
    """

    table: str
    bytes: float
    rows: tuple[int, ...]
    gates = True
    form: RowFormat | None = None
    tile: tuple[int, int] | None = None

    @abstractmethod
    def stack(self, count: int, product: Product) -> Any:
        """Return `count` random weights stacked along a new first dimension."""

    @abstractmethod
    def split(self, stack: Any) -> list[Any]:
        """Return the weights of a stack."""

    def make(self, product: Product) -> list[Any]:
        """Return random weights that together exceed the L2 cache."""
        count = int(WEIGHT_BYTES // (product.outputs * product.inner * self.bytes))
        return self.split(self.stack(max(count, 1), product))

    @abstractmethod
    def inputs(self, rows: int, inner: int) -> Any:
        """Return random rows as the product takes them."""

    @abstractmethod
    def run(self, x: Any, weight: Any, gated: bool, config: LinearConfig | None) -> torch.Tensor:
        """Compute a product; config None = with a library, which raises RuntimeError if it has no such product."""

    def rows_of(self, product: Product) -> tuple[int, ...]:
        """Return the numbers of rows for which a product is tuned."""
        return self.rows

    @abstractmethod
    def candidates(self, product: Product, rows: int) -> list[LinearConfig]: ...

    def expected(self, x: Any, weight: Any, gated: bool) -> torch.Tensor:
        """Return the reference result for the candidates."""
        return self.run(x, weight, gated, scaled_linear.FIXED)


class Bfloat16(Format):
    table, bytes, rows = "", 2, (1, 8, 16, 32, 64, 128)

    def stack(self, count: int, product: Product) -> torch.Tensor:
        return torch.randn(count, product.outputs, product.inner, device=DEVICE, dtype=torch.bfloat16) * 0.02

    def split(self, stack: torch.Tensor) -> list[Any]:
        return list(stack)

    def inputs(self, rows: int, inner: int) -> torch.Tensor:
        return torch.randn(rows, inner, dtype=torch.bfloat16, device=DEVICE)

    def run(self, x: Any, weight: Any, gated: bool, config: LinearConfig | None) -> torch.Tensor:
        gate = "silu" if gated else None
        return by_cublas(x, weight, gate=gate) if config is None else linear(x, weight, gate=gate, config=config)

    def expected(self, x: Any, weight: Any, gated: bool) -> torch.Tensor:
        return self.run(x, weight, gated, None)

    def candidates(self, product: Product, rows: int) -> list[LinearConfig]:
        weights = 2 if product.gated else 1
        if rows == 1:
            return [
                LinearConfig(1, block, inner, 1, warps, 1)
                for block, inner, warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (1, 2, 4, 8))
                if 16 <= block * inner * weights // (32 * warps) <= 64 and inner <= product.inner
            ]
        found = tiles(product, rows, (16, 32, 64, 128), (64, 128, 256), (1, 2, 3, 4, 6, 8), 2 * weights, 2, depths=3)
        device = torch.device(DEVICE)
        if not is_hopper(device):
            return found
        return [*(few_numbers_candidates(rows, product) or hopper_candidates(DENSE, rows, product, device)), *found]


class Scaled(Format):
    """Weights and activations of 8 bits. Without a tile each output has a scale."""

    bytes, gates = 1, False

    rows = (1, 16, 32, 64, 128, 256, 1024, 8192)

    def __init__(self, table: str, dtype: torch.dtype, tile: tuple[int, int] | None) -> None:
        self.table, self.tile = table, tile
        self.form = self._form = RowFormat(dtype, group=tile[1] if tile else 0)

    def stack(self, count: int, product: Product) -> ScaledWeight:
        outputs, inner, _ = product
        codes = torch.randint(-100, 100, (count, outputs, inner), dtype=torch.int8, device=DEVICE)
        if self._form.dtype != torch.int8:
            # Codes of both signs, none of which is NaN.
            codes = torch.where(codes < 0, codes + 100 - 128, codes).view(self._form.dtype)
        tile = self.tile or (1, inner)
        scales = torch.full((count, -(-outputs // tile[0]), -(-inner // tile[1])), 1e-3, device=DEVICE)
        return ScaledWeight(codes, scales, tile)

    def split(self, stack: ScaledWeight) -> list[Any]:
        return [ScaledWeight(*pair, stack.tile) for pair in zip(stack.codes, stack.scales, strict=True)]

    def inputs(self, rows: int, inner: int) -> QuantizedRows:
        return quantize_rows(torch.randn(rows, inner, dtype=torch.bfloat16, device=DEVICE), self._form)

    def run(self, x: Any, weight: Any, gated: bool, config: LinearConfig | None) -> torch.Tensor:
        if config is not None:
            return scaled_linear.scaled_linear(x, weight, None, torch.bfloat16, gated, config)
        if not scaled_linear.fits_torch(len(x.codes), weight, torch.bfloat16):
            raise RuntimeError("torch has no such product")
        result = scaled_linear.by_torch(x, weight, None, torch.bfloat16)
        return gate_mul(result, "silu") if gated else result

    def rows_of(self, product: Product) -> tuple[int, ...]:
        return self.rows[:3] if product.gated else self.rows

    def candidates(self, product: Product, rows: int) -> list[LinearConfig]:
        inners = (self.tile[1],) if self.tile else (128, 256)
        if rows > 128:
            return large_tiles(inners[0])
        if product.gated:
            return tiles(product, rows, (64, 128), inners, (1,), 2, 1)
        few = tiles(product, rows, (64, 128), inners, (1, 2, 4), 1, 1)
        if rows == 1:
            few += [
                LinearConfig(1, block, inner, 1, warps, 1)
                for block, inner, warps in ((2, 4096, 8), (4, 2048, 4), (4, 4096, 8), (8, 1024, 4), (8, 2048, 8))
                if inner <= product.inner
            ]
        return few


class Grouped(Format):
    """Weights of 4 bits in groups. kind: as in GroupedWeight."""

    bytes, rows = 0.5, (1, 16, 32, 64, 128, 256, 8192)

    def __init__(self, kind: str, group: int) -> None:
        self.table, self._group = kind, group

    def stack(self, count: int, product: Product) -> GroupedWeight:
        outputs, inner, _ = product
        codes = torch.randint(-(1 << 15), 1 << 15, (count, outputs, inner // 4), dtype=torch.int16, device=DEVICE)
        shape = count, outputs, inner // self._group
        if self.table == "e2m1":
            return GroupedWeight("e2m1", codes, torch.full(shape, 120, dtype=torch.uint8, device=DEVICE))
        scales = torch.full(shape, 0.01, dtype=torch.bfloat16, device=DEVICE)
        return GroupedWeight(self.table, codes, scales, torch.full_like(scales, 8, dtype=torch.uint8))

    def split(self, stack: GroupedWeight) -> list[Any]:
        parts = zip(stack.codes, stack.scales, stack.codes if stack.zeros is None else stack.zeros, strict=True)
        return [
            GroupedWeight(stack.kind, codes, scales, None if stack.zeros is None else zeros)
            for codes, scales, zeros in parts
        ]

    def inputs(self, rows: int, inner: int) -> torch.Tensor:
        return torch.randn(rows, inner, dtype=torch.bfloat16, device=DEVICE)

    def run(self, x: Any, weight: Any, gated: bool, config: LinearConfig | None) -> torch.Tensor:
        if config is not None:
            return grouped_linear.grouped_linear(x, weight, None, gated, config)
        return grouped_linear.by_numbers(x, weight, None, gated)

    def candidates(self, product: Product, rows: int) -> list[LinearConfig]:
        if rows > 256:
            return []
        splits = (1,) if product.gated else (1, 2, 4)
        few = tiles(product, min(rows, 128), (64, 128), (128, 256), splits, 1 if product.gated else 0.5, 2)
        # Warps beyond four would decode the same weights, unless there are outputs for them.
        few = [config._replace(num_warps=4) if config.block_outputs == 64 else config for config in few]
        if rows == 1:
            few += [LinearConfig(1, block, inner, 1, 4, 1) for block, inner in ((4, 1024), (4, 2048), (8, 1024))]
        return few


def tiles(
    product: Product,
    rows: int,
    blocks: Sequence[int],
    inners: Sequence[int],
    splits: Sequence[int],
    weight_bytes: float,
    input_bytes: int,
    depths: int = 2,
) -> list[LinearConfig]:
    """Return candidates that go through the tensor cores. weight_bytes: of the weights of an output and a column.
    depths: how many numbers of stages are tried."""
    found = []
    block_rows = max(rows, 16)
    weights = 2 if product.gated else 1
    for block, inner, parts in itertools.product(blocks, inners, splits):
        programs = triton.cdiv(product.outputs // weights, block) * parts
        steps = triton.cdiv(product.inner, inner * parts)
        large = parts == 1 and block >= 64
        if block * block_rows * weights > 128 * 128 or steps < 2 or programs < 96 or (programs > 800 and not large):
            continue
        stage = (block * weight_bytes + block_rows * input_bytes) * inner
        # Less than the whole shared memory lets several programs share a multiprocessor, or the next kernel start.
        stages = {min(int(SHARED_MEMORY // (stage * share)), steps, 8) for share in (1, 2, 4)}
        warps = 8 if block * block_rows * weights > 8192 else 4
        found += [
            LinearConfig(block_rows, block, inner, parts, warps, depth)
            for depth in sorted(stages)[-depths:]
            if depth > 1
        ]
    return found


def large_tiles(inner: int) -> list[LinearConfig]:
    """Return candidates for large batches of 8-bit rows."""
    sizes = ((128, 128, 8), (128, 256, 8), (256, 128, 8), (64, 256, 4))
    return [
        LinearConfig(rows, outputs, inner, 1, warps, depth)
        for rows, outputs, warps in sizes
        for depth in (3, 4)
        if (rows + outputs) * inner * depth <= SHARED_MEMORY
    ]


FP8 = torch.float8_e4m3fn
FORMATS: dict[str, Format] = {
    "bf16": Bfloat16(),
    "fp8": Scaled("fp8", FP8, None),
    "fp8_tiles": Scaled("fp8_tiles", FP8, (128, 128)),
    "int8": Scaled("int8", torch.int8, None),
    "int4": Grouped("int4", _GROUP),
    "e2m1": Grouped("e2m1", 32),
}
