"""Measures at start which kernels compute a model's products fastest, if the tables do not have their shapes.

A bug of the compiler or the driver may make a kernel wrong. So the results of a candidate must agree with those of a
trusted kernel.
"""

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from baton_common.cores import available_cores
from baton_kernels.unmeasured_products import Config, Unmeasured

from .compilation import compiling_ahead
from .cuda_graph import graph_seconds

log = logging.getLogger(__name__)

# Weights of different layers are read in turn, with at least this many bytes, so that none is in the L2 cache.
_BYTES = 256 << 20
# The largest error of a result, as a fraction of the sum of its size, the root mean square of all results and that of
# its output. Another order of additions changes products of 8 bits by a fifth of that. A product with gates has a few
# results of many times the root mean square, which are rounded accordingly.
_MOST_OFF = 0.1


def tune_products(
    products: Collection[Unmeasured], seconds: Callable[[Callable[[], object], int], float] = graph_seconds
) -> None:
    """Measure candidates for each product, and use the fastest ones from now on.

    seconds: returns how long work takes on the device.
    """
    began = time.monotonic()
    try:
        with compiling_ahead(available_cores()):
            for kind, shape, weights in products:
                for rows in kind.rows:
                    inputs = kind.inputs(weights[0], shape, rows)
                    for config in [kind.trusted, *kind.candidates(weights[0], shape, rows)]:
                        kind.compute(weights[0], shape, inputs, config)
        for each in products:
            each.learn({rows: _fastest(each, rows, seconds) for rows in each.kind.rows})
    # The rules also give valid kernels, if slower ones, so an error of a GPU or driver here need not stop the engine.
    except Exception as error:
        log.warning("products are not measured: %s", error, extra={"event": "products_not_tuned"})
        return
    log.info(
        "measured %d products that are in no table, in %.1f s", len(products), time.monotonic() - began,
        extra={"event": "products_tuned", "products": len(products)},
    )  # fmt: skip


def _fastest(unmeasured: Unmeasured, rows: int, seconds: Callable[[Callable[[], object], int], float]) -> Config:
    kind, shape, weights = unmeasured
    some = weights[: max(-(-_BYTES // kind.numbers(weights[0]).nbytes), 1)]
    # Rows that an earlier product has read may still be in the L1 caches, which those of a model never are.
    inputs = [kind.inputs(weights[0], shape, rows) for _ in some]

    def run(config: Config) -> None:
        for weight, own in zip(some, inputs, strict=True):
            kind.compute(weight, shape, own, config)

    found: dict[Config, float] = {}
    # There are two rounds, because the first one starts on an idle device with a lower clock rate.
    for config in 2 * _right(unmeasured, inputs[0], kind.candidates(weights[0], shape, rows)):
        took = seconds(partial(run, config), 1)
        found[config] = min(took, found.get(config, took))
    return min(found, key=lambda config: found[config], default=kind.trusted)


def _right(unmeasured: Unmeasured, inputs: Any, candidates: list[Config]) -> list[Config]:
    """Return the candidates that this GPU can run and whose results are correct."""
    kind, shape, [weight, *_] = unmeasured
    expected = kind.compute(weight, shape, inputs, kind.trusted).float()
    right: list[Config] = []
    for config in candidates:
        try:
            result = kind.compute(weight, shape, inputs, config).float()
        except OutOfResources:  # it needs more shared memory than this GPU has
            continue
        if _agree(result, expected):
            right.append(config)
        else:
            log.error(
                "not used, as its results for %d rows are wrong: %s of %s", len(result), config, shape,
                extra={"event": "wrong_kernel"},
            )  # fmt: skip
    return right


def _agree(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """result, expected: [rows, outputs] float32. True also if an expected value is not finite."""
    squares = expected.square()
    most = _MOST_OFF * (expected.abs() + squares.mean().sqrt() + squares.mean(dim=0).sqrt())
    return bool(((result - expected).abs() <= most).all()) or not bool(squares.isfinite().all())
