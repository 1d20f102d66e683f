"""Configurations for products that are in no table: rules that agree with most entries of the tables, and the
candidates to measure besides."""

import functools
import itertools

import torch
import triton

from .kernel_configs import ExpertLayer, ExpertsConfig, LinearConfig, Product, ProductConfig

# Bytes of shared memory of a program that has a multiprocessor of Hopper alone, and of each of two that share it.
_ALONE, _SHARED = 200 << 10, 112 << 10
_SPLITS = (8, 6, 4, 3, 2)
# Elements of a weight below which cuBLAS was faster for more than 16 rows, and for more than 32.
_LEAST_ELEMENTS = {32: 5 << 20, 64: 50 << 20}
# Outputs, inner elements and warps of programs for one row, by whether the product is gated.
_ONE_ROW = {
    False: ((2, 2048, 8), (1, 2048, 4), (2, 2048, 4), (2, 1024, 4), (4, 2048, 8), (4, 1024, 2), (4, 512, 1)),
    True: ((1, 2048, 8), (1, 2048, 4), (1, 1024, 4), (2, 1024, 4), (2, 1024, 2), (2, 2048, 8)),
}


# With more pairs of a token and an expert, kernels that read weights once for each row are never faster.
MOST_PAIRS_BY_ROW = 256
# Configurations for experts by the rows of a block.
_BLOCKS = {
    16: (
        ExpertsConfig(16, ProductConfig(64, 128, 4, 6), ProductConfig(128, 128, 4, 6)),
        ExpertsConfig(16, ProductConfig(128, 128, 4, 3), ProductConfig(128, 128, 4, 3)),
    ),
    32: (
        ExpertsConfig(32, ProductConfig(64, 128, 4, 5), ProductConfig(128, 128, 4, 5)),
        ExpertsConfig(32, ProductConfig(128, 128, 4, 3), ProductConfig(128, 128, 4, 3)),
    ),
    64: (
        ExpertsConfig(64, ProductConfig(128, 64, 8, 5), ProductConfig(256, 64, 8, 5)),
        ExpertsConfig(64, ProductConfig(256, 64, 8, 3), ProductConfig(256, 64, 8, 3)),
    ),
    128: (ExpertsConfig(128, ProductConfig(128, 64, 8, 4), ProductConfig(256, 64, 8, 4)),),
}


def unmeasured_linear(rows: int, outputs: int, inner: int, gated: bool, device: torch.device) -> LinearConfig | None:
    """Return the configuration for x [rows, inner] times a weight [outputs, inner]; None = leave it to cuBLAS."""
    if rows == 1:
        return LinearConfig(1, 2, min(triton.next_power_of_2(inner), 2048), 1, 8, 1)
    block_rows = max(triton.next_power_of_2(rows), 16)
    if not has_rules(inner, device) or block_rows > 64 or outputs * inner < _LEAST_ELEMENTS.get(block_rows, 0):
        return None
    processors = _processors(device)
    if gated:
        narrow = triton.cdiv(outputs // 2, 64) <= processors and block_rows == 16
        return _tile(block_rows, 32 if narrow else 64, 128 if block_rows == 16 else 64, 1, outputs, True, processors)
    # As many parts as there are idle multiprocessors for, each of at least four steps.
    tiles = triton.cdiv(outputs, 64)
    parts = [n for n in _SPLITS if n * tiles <= processors and inner % (128 * n) == 0 and inner >= 4 * 128 * n]
    return _tile(block_rows, 64, 128, parts[0] if parts else 1, outputs, False, processors)


def linear_candidates(
    rows: int, outputs: int, inner: int, gated: bool, device: torch.device
) -> list[LinearConfig | None]:
    """Return the configurations to measure for 1, 8, 16, 32 or 64 rows where `has_rules`, that of the rule first."""
    ruled = unmeasured_linear(rows, outputs, inner, gated, device)
    if rows == 1:
        found = [LinearConfig(1, block, part, 1, warps, 1) for block, part, warps in _ONE_ROW[gated] if part <= inner]
        return list(dict.fromkeys([ruled, *found]))
    processors = _processors(device)
    rows, units = max(rows, 16), outputs // 2 if gated else outputs
    tiles: list[LinearConfig | None] = []
    for block in (32, 64, 128):
        most = processors // triton.cdiv(units, block)
        fitting = [n for n in _SPLITS if n <= most and inner % (128 * n) == 0 and inner >= 4 * 128 * n]
        # More small programs than this would run one after another.
        if triton.cdiv(units, block) <= 6 * processors:
            tiles += [_tile(rows, block, 128, n, outputs, gated, processors) for n in (fitting[:2] or [1])]
    if gated:
        tiles.append(_tile(rows, 64, 64, 1, outputs, True, processors))
    return list(dict.fromkeys([ruled, *tiles, None]))


def coded_candidates(rows: int, product: Product, device: torch.device) -> list[LinearConfig]:
    """Return the configurations to measure for rows and weights of 8 bits, where `has_rules`."""
    processors, weights = _processors(device), 2 if product.gated else 1
    units = product.outputs // weights
    block_rows = min(max(rows, 16), 128)
    found = []
    for block, block_inner in itertools.product((64, 128), (128, 256)):
        cells = block * block_rows * weights
        stage = block_inner * (block * weights + block_rows)
        if cells > 128 * 128 or 2 * stage > _ALONE or 2 * block_inner > product.inner:
            continue
        tiles = triton.cdiv(units, block) * triton.cdiv(rows, block_rows)
        # The kernel cannot cut the sums of gated products into parts.
        fitting = [
            parts
            for parts in (() if product.gated else _SPLITS)
            if parts * tiles <= 2 * processors and product.inner >= 4 * block_inner * parts
        ]
        for parts in (*fitting[-2:], 1):
            memory = _ALONE if tiles * parts <= processors else _SHARED
            warps = 8 if cells > 8192 else 4
            found.append(LinearConfig(block_rows, block, block_inner, parts, warps, min(max(memory // stage, 2), 6)))
    return list(dict.fromkeys(found))


def has_rules(inner: int, device: torch.device) -> bool:
    """Whether a kernel here may be faster than cuBLAS for more than one row. Rows of weights that are not aligned to 16
    bytes are read slowly."""
    return inner % 8 == 0 and _is_hopper_or_newer(device)


def _tile(
    block_rows: int, block: int, block_inner: int, splits: int, outputs: int, gated: bool, processors: int
) -> LinearConfig:
    """Return a configuration with as many stages as fit. Where there are more programs than multiprocessors, two of
    them share one."""
    weights = 2 if gated else 1
    programs = triton.cdiv(outputs // weights, block) * splits
    stage = 2 * block_inner * (block * weights + block_rows)
    stages = (_ALONE if programs <= processors else _SHARED) // stage
    warps = 8 if block * block_rows * weights > 128 * 64 else 4
    return LinearConfig(block_rows, block, block_inner, splits, warps, min(max(stages, 2), 8))


def unmeasured_experts(
    pairs: int, count: int, experts: int, size: int, element_size: int, device: torch.device
) -> ExpertsConfig:
    """Return the configuration for so many pairs of a token and one of its `count` experts.

    experts: of a layer. size: hidden units of an expert. element_size: bytes of an element.
    """
    if pairs <= max(experts // 4, 8):
        # Each program of the second product reads weights of all experts of a token.
        at_once = max(1024 // triton.next_power_of_2(count), 128)
        inner = min(at_once, triton.next_power_of_2(size))
        return ExpertsConfig(1, ProductConfig(2, 1024, 4, 1), ProductConfig(2, inner, 4, 1))
    mean = triton.cdiv(pairs, experts)
    if element_size > 2:
        tiles = ProductConfig(64, 32, 4, 2)
        return ExpertsConfig(min(max(triton.next_power_of_2(mean), 16), 64), tiles, tiles)
    if not _is_hopper_or_newer(device):
        rows = min(max(triton.next_power_of_2(mean), 16), 128)
        tiles = ProductConfig(128 if rows > 16 else 64, 64, 8 if rows >= 64 else 4, 3)
        return ExpertsConfig(rows, tiles, tiles)
    # A third more rows than an expert has on average, as some have more. The largest blocks need many rows per expert.
    rows = 128 if mean >= 192 else min(max(triton.next_power_of_2(mean + mean // 3), 16), 64)
    return _BLOCKS[rows][0]


def experts_candidates(tokens: int, layer: ExpertLayer, device: torch.device) -> list[ExpertsConfig]:
    """Return the configurations to measure for 16-bit experts where `has_rules`. That of the rule comes first."""
    pairs = tokens * layer.used
    found = [unmeasured_experts(pairs, layer.used, layer.experts, layer.size, 2, device)]
    if pairs <= MOST_PAIRS_BY_ROW:
        inner = min(triton.next_power_of_2(layer.size), 128)
        down = ProductConfig(2, inner, 4, 1), ProductConfig(4, inner, 8, 1)
        tiles = [
            ProductConfig(*each, 1) for each in ((2, 2048, 4), (1, 2048, 4), (1, 1024, 2)) if each[1] <= layer.hidden
        ]
        found += [ExpertsConfig(1, *each) for each in itertools.product(tiles, down)]
    for rows in rows_of_blocks(pairs / layer.experts):
        found += _BLOCKS[rows]
    return list(dict.fromkeys(found))


def scaled_rows_candidates(tokens: int, layer: ExpertLayer) -> list[ExpertsConfig]:
    """Return the configurations to measure for scaled_expert_rows.py. A scale may set block_inner."""
    if tokens * layer.used > MOST_PAIRS_BY_ROW:
        return []
    first = [ProductConfig(outputs, 1024, warps, 1) for outputs, warps in ((4, 2), (8, 4), (16, 4))]
    second = [ProductConfig(outputs, 256, warps, 1) for outputs, warps in ((2, 4), (4, 8))]
    return [ExpertsConfig(1, *each) for each in itertools.product(first, second)]


def coded_experts_candidates(tokens: int, layer: ExpertLayer, block_inner: int) -> list[ExpertsConfig]:
    """Return the configurations to measure for experts and rows in 8 bits. block_inner: the columns that share a scale;
    0 = any number of columns."""

    def tiles(rows: int, block: int, inner: int, weights: int) -> ProductConfig:
        """weights: 2 for gates and ups, otherwise 1."""
        warps = 8 if block * rows * weights > 8192 else 4
        return ProductConfig(block, inner, warps, min(max(_SHARED // (inner * (block * weights + rows)), 2), 6))

    blocks = rows_of_blocks(tokens * layer.used / layer.experts)
    inners = (block_inner,) if block_inner else (128, 256)
    return [
        ExpertsConfig(rows, tiles(rows, block, inner, 2), tiles(rows, block, inner, 1))
        for rows, block, inner in itertools.product(blocks, (64, 128), inners)
        if block * rows <= 128 * 128
    ]


def rows_of_blocks(mean: float) -> list[int]:
    """Return the block sizes, in rows, that may be fastest for experts with `mean` rows on average."""
    return [rows for rows in _BLOCKS if min(mean / 2, 64) <= rows <= max(2 * mean, 16)]


@functools.cache
def _is_hopper_or_newer(device: torch.device) -> bool:
    """Whether a program can have as much shared memory as the larger configurations need."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
