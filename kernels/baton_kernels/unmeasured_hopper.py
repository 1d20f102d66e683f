"""The configurations to measure for the kernel in hopper_products.py. Those that are fastest most often come first."""

import functools
from typing import NamedTuple

import torch
import triton

from .kernel_configs import ExpertLayer, ExpertsConfig, LinearConfig, Product, ProductConfig
from .reference.scaled_linear import ScaledWeight

# Bytes of shared memory of a program that has a multiprocessor alone, and of each of two or three that share it.
_ALONE, _OF_TWO, _OF_THREE = 200 << 10, 110 << 10, 70 << 10
# By the rows of a program: outputs, warps, columns of a step if rows have 16-bit elements, and shared memory.
_Tiles = dict[int, tuple[tuple[int, int, int, int], ...]]
_CODE_TILES: _Tiles = {
    16: ((128, 8, 256, _OF_TWO), (64, 4, 256, _OF_TWO), (64, 4, 256, _OF_THREE), (64, 4, 128, _OF_TWO)),
    32: ((128, 4, 256, _OF_TWO), (128, 8, 256, _OF_TWO), (128, 8, 128, _OF_TWO), (64, 4, 128, _OF_TWO)),
    64: ((128, 8, 128, _ALONE), (256, 8, 128, _ALONE), (128, 8, 64, _ALONE), (256, 8, 64, _ALONE)),
    128: ((128, 8, 64, _ALONE), (128, 8, 128, _ALONE), (256, 8, 64, _ALONE)),
    256: ((128, 8, 64, _ALONE),),
}
_NUMBER_TILES: _Tiles = {
    16: ((128, 8, 128, _OF_TWO), (128, 8, 64, _OF_TWO), (64, 4, 128, _OF_TWO)),
    32: ((128, 8, 64, _OF_TWO), (128, 8, 128, _OF_TWO), (64, 4, 128, _OF_TWO)),
    64: ((256, 8, 64, _ALONE), (128, 8, 64, _OF_TWO)),
    128: ((256, 8, 64, _ALONE), (128, 8, 64, _ALONE)),
    256: ((128, 8, 64, _ALONE),),
}
_DENSE_TILES: _Tiles = {
    16: ((64, 4, 128, _ALONE), (128, 8, 128, _OF_TWO), (128, 8, 64, _OF_TWO), (64, 4, 128, _OF_TWO)),
    32: ((64, 4, 128, _ALONE), (128, 8, 64, _OF_TWO), (64, 4, 64, _OF_THREE), (128, 8, 128, _OF_TWO)),
    64: ((64, 4, 128, _ALONE), (128, 8, 64, _OF_TWO), (256, 8, 64, _ALONE)),
    128: ((64, 4, 64, _ALONE), (256, 8, 64, _ALONE), (128, 4, 64, _ALONE)),
}


class Operands(NamedTuple):
    """Rows and weights of a format. row, weight: bytes of an element. tiles: as above. columns: the columns of a step,
    if the scales require a number; 0 = any. sums: the most sums of a thread. most_rows: the most rows of a program."""

    row: float
    weight: float
    tiles: _Tiles
    columns: int = 0
    sums: int = 128
    most_rows: int = 256


CODES = Operands(2, 0.5, _CODE_TILES)
NUMBERS = Operands(2, 2, _NUMBER_TILES)  # of experts
DENSE = Operands(2, 2, _DENSE_TILES, most_rows=128)


def scaled_numbers(weight: ScaledWeight) -> Operands:
    """Return the operands for rows and weights of 8 bits."""
    if weight.tile[1] < weight.codes.shape[-1]:
        # Each step has its own scales, so the sums of one step need registers besides the sums of all steps.
        return Operands(1, 1, _NUMBER_TILES, weight.tile[1], sums=64, most_rows=128)
    # Triton does not support the instruction that multiplies 256 rows of integers.
    return Operands(1, 1, _NUMBER_TILES, most_rows=128 if weight.codes.dtype == torch.int8 else 256)


def unmeasured_hopper(
    operands: Operands, rows: int, outputs: int, inner: int, gated: bool, device: torch.device
) -> LinearConfig:
    """Return the configuration for x [rows, inner] times a weight [outputs, inner]."""
    return hopper_candidates(operands, rows, Product(outputs, inner, gated), device)[0]


def hopper_candidates(operands: Operands, rows: int, product: Product, device: torch.device) -> list[LinearConfig]:
    """Return the configurations to measure for a product of `rows` rows."""
    processors = _processors(device)
    rows = max(triton.next_power_of_2(rows), 16)
    blocks = {min(rows, most) for most in (operands.most_rows, 128)}
    found = []
    for block_rows in sorted(blocks, reverse=True):
        for memory, config in _configs(operands, block_rows):
            # With gates, half of a tile's outputs are gates and the other half ups.
            tiles = triton.cdiv(product.outputs, config.block_outputs) * triton.cdiv(rows, block_rows)
            together = _ALONE // memory * processors
            fitting = [1, *(parts for parts in (2, 4, 8) if parts * config.block_inner <= product.inner)]
            # As few parts as let programs fill more than half of the device, or the next larger number.
            enough = [parts for parts in fitting if parts * tiles > together // 2] or fitting[-1:]
            found += [
                config._replace(splits=parts)
                for parts in enough[:2]
                if parts == enough[0] or parts * tiles <= 2 * together
            ]
    return list(dict.fromkeys(found))


def hopper_experts_candidates(operands: Operands, tokens: int, layer: ExpertLayer) -> list[ExpertsConfig]:
    """Return the configurations to measure for a layer of experts."""
    mean = tokens * layer.used / layer.experts
    return [
        ExpertsConfig(each.block_rows, *2 * (ProductConfig(*each[1:3], each.num_warps, each.num_stages),), hopper=True)
        for rows in operands.tiles
        if min(mean, operands.most_rows) / 2 <= rows <= min(max(2 * mean, 16), operands.most_rows)
        for _, each in _configs(operands, rows)
    ]


def _configs(operands: Operands, block_rows: int) -> list[tuple[int, LinearConfig]]:
    """Return (shared memory, configuration) pairs. The sums have one part, and as many stages as fit are used."""
    found: list[tuple[int, LinearConfig]] = []
    for block, warps, columns, memory in operands.tiles[block_rows]:
        inner = operands.columns or int(columns * 2 // operands.row)
        stage = int(inner * (block * operands.weight + block_rows * operands.row))
        if block_rows * block > operands.sums * 32 * warps or 2 * stage > memory:
            continue
        config = LinearConfig(block_rows, block, inner, 1, warps, min(memory // stage, 8), hopper=True)
        if all(config != other for _, other in found):
            found.append((memory, config))
    return found


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
