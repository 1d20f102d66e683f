"""The fastest configuration of a kernel on each GPU, from measured tables, and a default for products not measured.

loadtest/engine/tune_linear.py and tune_experts.py write the tables.
"""

import functools
import json
from importlib import resources
from typing import NamedTuple

import torch
import triton


class LinearConfig(NamedTuple):
    """A configuration of the kernels in linear.py. block_rows 1 selects the one-row kernel. splits: parts of the inner
    dimension."""

    block_rows: int
    block_outputs: int
    block_inner: int
    splits: int
    num_warps: int
    num_stages: int


class ProductConfig(NamedTuple):
    """Tile sizes of a product in experts.py."""

    block_outputs: int
    block_inner: int
    num_warps: int
    num_stages: int


class ExpertsConfig(NamedTuple):
    """A configuration of the kernels in experts.py. block_rows 1 selects the kernels for small batches."""

    block_rows: int
    gate_up: ProductConfig
    down: ProductConfig


MOST_ROWS = 128  # products of more rows are bound by arithmetic, for which cuBLAS is fastest


def linear_config(rows: int, outputs: int, inner: int, gated: bool, device: torch.device) -> LinearConfig | None:
    """Return the configuration for x [rows, inner] times a weight [outputs, inner]; None = leave it to cuBLAS."""
    if rows > MOST_ROWS:
        return None
    return _choose(rows, outputs, inner, gated, device)


def product_name(outputs: int, inner: int, gated: bool) -> str:
    return f"{outputs}x{inner}{' gated' if gated else ''}"


@functools.cache
def _choose(rows: int, outputs: int, inner: int, gated: bool, device: torch.device) -> LinearConfig | None:
    measured = _table(torch.cuda.get_device_name(device)).get(product_name(outputs, inner, gated))
    if measured is None:
        if rows > 1:
            return None
        return LinearConfig(1, 2, min(triton.next_power_of_2(inner), 2048), 1, 8, 1)
    for most, config in measured.items():
        if rows <= int(most):
            return None if config is None else LinearConfig(*config)
    return None


def experts_config(
    tokens: int, count: int, experts: int, hidden: int, size: int, element_size: int, device: torch.device
) -> ExpertsConfig:
    """Return the configuration for tokens that use `count` experts each.

    experts: of a layer. size: hidden units of an expert. element_size: bytes of an element.
    """
    pairs = tokens * count
    if pairs <= max(experts // 4, 8):
        # Each program of the second product reads weights of all experts of a token.
        at_once = max(1024 // triton.next_power_of_2(count), 128)
        inner = min(at_once, triton.next_power_of_2(size))
        return ExpertsConfig(1, ProductConfig(4, 512, 4, 1), ProductConfig(2, inner, 4, 1))
    # As many rows as an expert has on average, within limits.
    rows = min(max(triton.next_power_of_2(triton.cdiv(pairs, experts)), 16), 128)
    if element_size > 2:
        tiles = ProductConfig(64, 32, 4, 2)
        return ExpertsConfig(min(rows, 64), tiles, tiles)
    tiles = ProductConfig(128 if rows > 16 else 64, 64, 8 if rows == 128 else 4, 3)
    return ExpertsConfig(rows, tiles, tiles)


@functools.cache
def _table(device_name: str) -> dict[str, dict[str, list[int] | None]]:
    """Return the best configurations of each product, keyed by the most rows that each is for, in ascending order."""
    path = resources.files(__package__) / "tuned" / f"{device_name.lower().replace(' ', '_')}.json"
    if not path.is_file():
        return {}
    table: dict[str, dict[str, list[int] | None]] = json.loads(path.read_text())
    return table
