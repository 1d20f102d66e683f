"""Measures at start which kernels compute the products of a model fastest, where no table has their shapes."""

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from baton_common.cores import available_cores
from baton_kernels.kernel_configs import LinearConfig, Product
from baton_kernels.linear import by_cublas, linear
from baton_kernels.tuning import learn
from baton_kernels.unmeasured import linear_candidates

from .compilation import compiling_ahead
from .cuda_graph import graph_seconds

log = logging.getLogger(__name__)

_ROWS = (1, 16, 32, 64)  # each for all smaller numbers, too
# Weights of different layers are read in turn, as in a step, so that none of them is found in the L2 cache.
_BYTES = 256 << 20


def tune_products(
    products: dict[Product, list[torch.Tensor]],
    seconds: Callable[[Callable[[], object], int], float] = graph_seconds,
) -> None:
    """Measure candidates for each product, and use the fastest ones from now on.

    products: the weights [outputs, inner] of each, of 16 bits. seconds: returns how long work takes on the device.
    """
    began = time.monotonic()
    try:
        with compiling_ahead(available_cores()):
            for product, weights in products.items():
                for rows in _ROWS:
                    for config in linear_candidates(rows, *product, weights[0].device):
                        _compute(product, rows, config, weights[:1])
        for product, weights in products.items():
            choices = {rows: _fastest(product, rows, weights, seconds) for rows in _ROWS}
            learn(product, weights[0].device, choices)
    # The rules serve as well, if not as fast, so a GPU or a driver that refuses a candidate need not stop the engine.
    except Exception as error:
        log.warning("products are not measured: %s", error, extra={"event": "products_not_tuned"})
        return
    log.info(
        "measured %d products that are in no table, in %.1f s", len(products), time.monotonic() - began,
        extra={"event": "products_tuned", "products": len(products)},
    )  # fmt: skip


def _fastest(
    product: Product,
    rows: int,
    weights: list[torch.Tensor],
    seconds: Callable[[Callable[[], object], int], float],
) -> LinearConfig | None:
    some = weights[: max(-(-_BYTES // weights[0].nbytes), 1)]
    found: dict[LinearConfig | None, float] = {}
    # The first round also brings an idle device up to its clock.
    for _ in range(2):
        for config in linear_candidates(rows, *product, weights[0].device):
            took = seconds(partial(_compute, product, rows, config, some), 1)
            found[config] = min(took, found.get(config, took))
    return min(found, key=lambda config: found[config])


def _compute(product: Product, rows: int, config: LinearConfig | None, weights: list[torch.Tensor]) -> None:
    """Multiply by each of the weights. config: None = by cuBLAS."""
    x, gate = weights[0].new_zeros(rows, product.inner), "silu" if product.gated else None
    for weight in weights:
        if config is None:
            by_cublas(x, weight, gate=gate)
        else:
            linear(x, weight, gate=gate, config=config)
