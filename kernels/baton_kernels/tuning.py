"""The fastest configuration of a kernel on each GPU, from measured tables, and rules for products not measured.

loadtest/engine/tune_linear.py writes the tables: one for each GPU and weight format. An engine measures products that
are in no table, and layers of experts (unmeasured_products.py), and passes the results to `learn`.
"""

import functools
import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import torch

from .kernel_configs import ExpertLayer, ExpertsConfig, LinearConfig, Product, ProductConfig
from .unmeasured import unmeasured_experts, unmeasured_linear

# The measured GPU with the same multiprocessors, by compute capability. Its tables also serve GPUs without their own.
_SAME_CHIP = {(9, 0): "NVIDIA H200"}
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
    measured = _entries("", product_name(outputs, inner, gated), device)
    if not measured:
        return unmeasured_linear(rows, outputs, inner, gated, device)
    for most, config in measured.items():
        if rows <= int(most):
            return None if config is None else LinearConfig(*config)
    return None


# The measurements of this process: entries like those of the tables, by format and name of the product.
_learned: dict[tuple[str, str, torch.device], dict[str, Any]] = {}


def is_known(format: str, shape: Product | ExpertLayer, device: torch.device) -> bool:
    """Whether a product has been measured. format: of its weight, "" = 16 bits."""
    return bool(_entries(format, _name(shape), device))


def learn(format: str, shape: Product | ExpertLayer, device: torch.device, choices: dict[int, Any]) -> None:
    """Use these configurations from now on. choices: keyed by the most rows or tokens that each is for, in ascending
    order; None = use a library."""
    _learned[format, _name(shape), device] = {str(most): config for most, config in choices.items()}
    _compiled.discard((format, _name(shape), device))
    for cached in (_choose, _measured, _measured_experts):
        cached.cache_clear()


def _name(shape: Product | ExpertLayer) -> str:
    return product_name(*shape) if isinstance(shape, Product) else experts_name(*shape)


def _entries(format: str, name: str, device: torch.device) -> dict[str, Any]:
    """Return the measured configurations of a product, by the most rows that each is for, in ascending order."""
    return _table(format, device).get(name) or _learned.get((format, name, device)) or {}


def experts_config(
    tokens: int, count: int, experts: int, hidden: int, size: int, element_size: int, device: torch.device
) -> ExpertsConfig:
    """Return the configuration for tokens that use `count` experts each.

    experts: of a layer. size: hidden units of an expert. element_size: bytes of an element.
    """
    if element_size == 2:
        measured = _measured_experts(experts_name(count, experts, hidden, size), device)
        if measured:
            # The last entry serves all larger numbers of tokens, too.
            return next((config for most, config in measured if tokens <= most), measured[-1][1])
    return unmeasured_experts(tokens * count, count, experts, size, element_size, device)


def experts_name(count: int, experts: int, hidden: int, size: int) -> str:
    return f"{count} of {experts}, {size}x{hidden}"


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
    return [
        (int(most), ExpertsConfig(rows, ProductConfig(*gate_up), ProductConfig(*down), hopper))
        for most, (rows, gate_up, down, hopper) in _learned.get((format, name, device), {}).items()
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

    An engine computes each product when it starts, so all these kernels are compiled before it serves requests.
    """
    name = product_name(outputs, inner, gated)
    if (format, name, device) in _compiled:
        return []
    _compiled.add((format, name, device))
    measured = _measured(format, name, device)
    return list(dict.fromkeys(config for _, config in measured if config is not None))


@functools.cache
def _measured(format: str, name: str, device: torch.device) -> list[tuple[int, LinearConfig | None]]:
    """Return the best configurations, each with the most rows that it is for, in ascending order."""
    entries = _entries(format, name, device).items()
    return [(int(most), None if config is None else LinearConfig(*config)) for most, config in entries]


@functools.cache
def _table(format: str, device: torch.device) -> dict[str, Any]:
    """Return the best configurations of each product, keyed by the most rows that each is for, in ascending order."""
    if device.type != "cuda":
        return {}
    own = _read_table(table_name(format, torch.cuda.get_device_name(device)))
    if own:
        return own
    like = _SAME_CHIP.get(torch.cuda.get_device_capability(device))
    return _read_table(table_name(format, like)) if like else {}


def table_name(format: str, device_name: str) -> str:
    """Return the name of the file with a table. format: of the weights, "" = 16 bits."""
    parts = [format] * bool(format) + [device_name]
    return "_".join(parts).lower().replace(" ", "_") + ".json"


def _read_table(name: str) -> dict[str, Any]:
    path = resources.files(__package__) / "tuned" / name
    table: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return table
