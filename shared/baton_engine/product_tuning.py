"""Measures at start which kernels compute the products of a model fastest, where no table has their shapes."""

import logging
import time
from collections.abc import Callable, Collection
from functools import partial

from triton.runtime.errors import OutOfResources

from baton_common.cores import available_cores
from baton_kernels.unmeasured_products import Config, Unmeasured

from .compilation import compiling_ahead
from .cuda_graph import graph_seconds

log = logging.getLogger(__name__)

# Weights of different layers are read in turn, as in a step, so that none of them is found in the L2 cache.
_BYTES = 256 << 20


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
                    for config in kind.candidates(weights[0], shape, rows):
                        kind.compute(weights[0], shape, rows, config)
        for each in products:
            each.learn({rows: _fastest(each, rows, seconds) for rows in each.kind.rows})
    # The rules serve as well, if not as fast, so a GPU or a driver that refuses a candidate need not stop the engine.
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

    def run(config: Config) -> None:
        for weight in some:
            kind.compute(weight, shape, rows, config)

    found: dict[Config, float] = {}
    # The first round also brings an idle device up to its clock.
    for config in 2 * kind.candidates(weights[0], shape, rows):
        try:
            took = seconds(partial(run, config), 1)
        except OutOfResources:  # it needs more shared memory than this GPU has
            continue
        found[config] = min(took, found.get(config, took))
    return min(found, key=lambda config: found[config])
