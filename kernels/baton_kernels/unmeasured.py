"""Configurations of products that were not measured, by rules that agree with most entries of the measured tables."""

import torch
import triton

from .kernel_configs import ExpertsConfig, LinearConfig, ProductConfig

# By rows of a tile: the stages with which two tiles have room on a multiprocessor of Hopper, and those of one alone.
_STAGES = {16: (5, 8), 32: (4, 8), 64: (3, 6)}
_SPLITS = (8, 6, 4, 3, 2)
# Elements of a weight below which cuBLAS was faster for more than 16 rows, and for more than 32.
_LEAST_ELEMENTS = {32: 5 << 20, 64: 50 << 20}


def unmeasured_linear(rows: int, outputs: int, inner: int, gated: bool, device: torch.device) -> LinearConfig | None:
    """Return the configuration for x [rows, inner] times a weight [outputs, inner]; None = leave it to cuBLAS."""
    if rows == 1:
        return LinearConfig(1, 2, min(triton.next_power_of_2(inner), 2048), 1, 8, 1)
    # Rows of weights that do not begin where 16 bytes do are read slowly.
    if inner % 8 or not _is_hopper_or_newer(device):
        return None
    block_rows = max(triton.next_power_of_2(rows), 16)
    if block_rows > 64 or outputs * inner < _LEAST_ELEMENTS.get(block_rows, 0):
        return None
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if gated:
        return _unmeasured_gated(block_rows, outputs // 2, inner, processors)
    tiles = triton.cdiv(outputs, 64)
    shared, alone = _STAGES[block_rows]
    if tiles > processors:
        return LinearConfig(block_rows, 64, 128, 1, 4, shared)
    # As many parts as there are idle multiprocessors for, each of at least four steps.
    parts = [n for n in _SPLITS if n * tiles <= processors and inner % (128 * n) == 0 and inner >= 4 * 128 * n]
    return LinearConfig(block_rows, 64, 128, parts[0] if parts else 1, 4, alone)


def _unmeasured_gated(block_rows: int, units: int, inner: int, processors: int) -> LinearConfig:
    """units: pairs of outputs."""
    if triton.cdiv(units, 64) <= processors and block_rows == 16:
        return LinearConfig(16, 32, 128, 1, 4, 8)
    return LinearConfig(block_rows, 64, 128 if block_rows == 16 else 64, 1, 4, {16: 3, 32: 5, 64: 4}[block_rows])


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
    # Twice the rows that an expert has on average, as some have more. The largest blocks are for many of them only.
    rows = 128 if mean >= 256 else min(max(triton.next_power_of_2(2 * mean), 16), 64)
    return {
        16: ExpertsConfig(16, ProductConfig(64, 128, 4, 6), ProductConfig(128, 128, 4, 6)),
        32: ExpertsConfig(32, ProductConfig(64, 128, 4, 5), ProductConfig(128, 128, 4, 5)),
        64: ExpertsConfig(64, ProductConfig(128, 64, 8, 5), ProductConfig(256, 64, 8, 5)),
        128: ExpertsConfig(128, ProductConfig(128, 64, 8, 4), ProductConfig(256, 64, 8, 4)),
    }[rows]


def _is_hopper_or_newer(device: torch.device) -> bool:
    """Whether a program can have the shared memory that the larger configurations need."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
