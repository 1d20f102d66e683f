"""The products that a step computes and no table has, so that an engine can measure them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from .kernel_configs import LinearConfig, Product
from .tuning import is_known
from .unmeasured import has_rules


class Kind(Protocol):
    """A kind of products, with weights of one format.

    format: as tables call it. rows: the numbers of rows to measure, each for all smaller numbers, too.
    """

    @property
    def format(self) -> str: ...

    @property
    def rows(self) -> tuple[int, ...]: ...

    def numbers(self, weight: Any) -> torch.Tensor:
        """Return the numbers or codes of a weight, [outputs, inner]."""

    def candidates(self, weight: Any, product: Product, rows: int) -> list[LinearConfig | None]:
        """Return the configurations that are worth measuring; None = by a library."""

    def compute(self, weight: Any, product: Product, rows: int, config: LinearConfig | None) -> object:
        """Multiply so many rows of zeros."""


class Unmeasured(NamedTuple):
    """A product, and its weights in all layers."""

    kind: Kind
    product: Product
    weights: list[Any]


_found: dict[tuple[str, Product], Unmeasured] | None = None


@contextmanager
def watching() -> Iterator[dict[tuple[str, Product], Unmeasured]]:
    """Yield the products that are computed in this context and are worth measuring, by format and shape."""
    global _found
    _found = {}
    try:
        yield _found
    finally:
        _found = None


def watch(kind: Kind, weight: Any, product: Product) -> None:
    """Note that a product is computed."""
    if _found is None:
        return
    numbers = kind.numbers(weight)
    if is_known(kind.format, product, numbers.device) or not has_rules(product.inner, numbers.device):
        return
    weights = _found.setdefault((kind.format, product), Unmeasured(kind, product, [])).weights
    if all(kind.numbers(other) is not numbers for other in weights):
        weights.append(weight)
