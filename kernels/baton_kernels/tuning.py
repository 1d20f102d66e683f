"""The fastest configuration of a kernel on each GPU, from measured tables, and a default for products not measured.

loadtest/engine/tune_linear.py and tune_experts.py write the tables: one for each GPU and format of weights.
"""

import functools
import json
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

import torch
import triton


class LinearConfig(NamedTuple):
    """A configuration of the kernels in linear.py, scaled_linear.py and grouped_linear.py. block_rows 1 selects the
    one-row kernel. splits: parts of the inner dimension."""

    block_rows: int
    block_outputs: int
    block_inner: int
    splits: int
    num_warps: int
    num_stages: int


class ProductConfig(NamedTuple):
    """Tile sizes of a product in experts.py. whole: the GPU's copy engine fetches the tiles of weights, whose rows must
    be multiples of 16 bytes; without effect in small batches."""

    block_outputs: int
    block_inner: int
    num_warps: int
    num_stages: int
    whole: bool = False


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
    if element_size == 2 and device.type == "cuda":
        measured = _measured_experts(experts_name(count, experts, hidden, size), device)
        if measured:
            # The last entry serves all larger numbers of tokens, too.
            return next((config for most, config in measured if tokens <= most), measured[-1][1])
    return _unmeasured_experts(tokens * count, count, experts, size, element_size)


def experts_name(count: int, experts: int, hidden: int, size: int) -> str:
    return f"{count} of {experts}, {size}x{hidden}"


def _unmeasured_experts(pairs: int, count: int, experts: int, size: int, element_size: int) -> ExpertsConfig:
    if pairs <= max(experts // 4, 8):
        # Each program of the second product reads weights of all experts of a token.
        at_once = max(1024 // triton.next_power_of_2(count), 128)
        inner = min(at_once, triton.next_power_of_2(size))
        return ExpertsConfig(1, ProductConfig(2, 1024, 4, 1), ProductConfig(2, inner, 4, 1))
    # As many rows as an expert has on average, within limits.
    rows = min(max(triton.next_power_of_2(triton.cdiv(pairs, experts)), 16), 128)
    if element_size > 2:
        tiles = ProductConfig(64, 32, 4, 2)
        return ExpertsConfig(min(rows, 64), tiles, tiles)
    tiles = ProductConfig(128 if rows > 16 else 64, 64, 8 if rows >= 64 else 4, 3)
    return ExpertsConfig(rows, tiles, tiles)


def quantized_experts_config(
    tokens: int, format: str, count: int, experts: int, hidden: int, size: int, device: torch.device
) -> ExpertsConfig | None:
    """As experts_config, for experts in a format; None if they were not measured."""
    measured = _measured_experts(experts_name(count, experts, hidden, size), device, format)
    if not measured:
        return None
    return next((config for most, config in measured if tokens <= most), measured[-1][1])


def compile_experts_first(
    format: str, count: int, experts: int, hidden: int, size: int, device: torch.device
) -> list[ExpertsConfig]:
    """As compile_first, for experts in a format."""
    name = experts_name(count, experts, hidden, size)
    if (format, name, device) in _compiled:
        return []
    _compiled.add((format, name, device))
    return list(dict.fromkeys(config for _, config in _measured_experts(name, device, format)))


@functools.cache
def _measured_experts(name: str, device: torch.device, format: str = "") -> list[tuple[int, ExpertsConfig]]:
    """Return the best configurations, each with the most tokens that it is for, in ascending order."""
    if device.type != "cuda":
        return []
    table = _read_table(table_name(format, torch.cuda.get_device_name(device), experts=True))
    return [
        (int(most), ExpertsConfig(rows, ProductConfig(*gate_up), ProductConfig(*down)))
        for most, (rows, gate_up, down) in table.get(name, {}).items()
    ]


def quantized_config(
    rows: int,
    format: str,
    outputs: int,
    inner: int,
    gated: bool,
    device: torch.device,
    default: Callable[[int, int, int], LinearConfig | None],
) -> LinearConfig | None:
    """Return the configuration for rows [rows, inner] times a quantized weight [outputs, inner]; None = leave it to a
    library.

    default: gives the configuration of a product that was not measured, from rows, outputs and inner.
    """
    measured = _measured(format, product_name(outputs, inner, gated), device)
    if not measured:
        return default(rows, outputs, inner)
    # The last entry serves all larger numbers of rows, too.
    return next((config for most, config in measured if rows <= most), measured[-1][1])


_compiled: set[object] = set()


def compile_first(format: str, outputs: int, inner: int, gated: bool, device: torch.device) -> list[LinearConfig]:
    """Return all measured configurations of a product the first time that it is computed, and none later.

    An engine computes each product when it starts. What is compiled then is not compiled while requests are served.
    """
    key = format, outputs, inner, gated, device
    if key in _compiled:
        return []
    _compiled.add(key)
    measured = _measured(format, product_name(outputs, inner, gated), device)
    return list(dict.fromkeys(config for _, config in measured if config is not None))


@functools.cache
def _measured(format: str, name: str, device: torch.device) -> list[tuple[int, LinearConfig | None]]:
    """Return the best configurations, each with the most rows that it is for, in ascending order."""
    if device.type != "cuda":
        return []
    entries = _format_table(format, device).get(name, {})
    return [(int(most), None if config is None else LinearConfig(*config)) for most, config in entries.items()]


@functools.cache
def _format_table(format: str, device: torch.device) -> dict[str, Any]:
    return _read_table(table_name(format, torch.cuda.get_device_name(device)))


@functools.cache
def _table(device_name: str) -> dict[str, dict[str, list[int] | None]]:
    """Return the best configurations of each product, keyed by the most rows that each is for, in ascending order."""
    return _read_table(table_name("", device_name))


def table_name(format: str, device_name: str, experts: bool = False) -> str:
    """Return the name of the file with a table. format: of the weights, "" = 16 bits. experts: the table is theirs."""
    parts = ["experts"] * experts + [format] * bool(format) + [device_name]
    return "_".join(parts).lower().replace(" ", "_") + ".json"


def _read_table(name: str) -> dict[str, Any]:
    path = resources.files(__package__) / "tuned" / name
    table: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return table
