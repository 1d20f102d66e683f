"""The products that a step computes and no table has, so that an engine can measure them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from .kernel_configs import ExpertLayer, ExpertsConfig, LinearConfig, Product
from .reference.routing import NOT_OWN

Shape = Product | ExpertLayer
Config = LinearConfig | ExpertsConfig | None  # None = by a library


class Kind(Protocol):
    """A kind of products, with weights of one format. rows: the numbers of rows to measure, each for all smaller
    numbers, too."""

    @property
    def rows(self) -> tuple[int, ...]: ...

    def numbers(self, weight: Any) -> torch.Tensor:
        """Return the numbers or codes of a weight."""

    def is_open(self, weight: Any, shape: Any) -> bool:
        """Whether a product has not been measured and is worth it."""

    def candidates(self, weight: Any, shape: Any, rows: int) -> list[Any]:
        """Return the configurations that are worth measuring."""

    def compute(self, weight: Any, shape: Any, rows: int, config: Any) -> object:
        """Multiply so many rows of zeros."""

    def learn(self, weight: Any, shape: Any, choices: dict[int, Any]) -> None:
        """Take these configurations from now on. choices: by the most rows that each is for, in ascending order."""


class Unmeasured(NamedTuple):
    """A product, and its weights in all layers."""

    kind: Kind
    shape: Shape
    weights: list[Any]


_found: dict[tuple[Kind, Shape], Unmeasured] | None = None


@contextmanager
def watching() -> Iterator[dict[tuple[Kind, Shape], Unmeasured]]:
    """Yield the products that are computed in this context and are worth measuring."""
    global _found
    _found = {}
    try:
        yield _found
    finally:
        _found = None


def watch(kind: Kind, weight: Any, shape: Shape) -> None:
    """Note that a product is computed."""
    if _found is None or not kind.is_open(weight, shape):
        return
    weights = _found.setdefault((kind, shape), Unmeasured(kind, shape, [])).weights
    if all(kind.numbers(other) is not kind.numbers(weight) for other in weights):
        weights.append(weight)


# Numbers of tokens for which layers of experts are measured.
TOKENS = tuple(1 << exponent for exponent in range(13))


@functools.cache
def random_choice(
    tokens: int, layer: ExpertLayer, held: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and experts of tokens, as a router gives them. held: of the layer's experts, the first ones."""
    generator = torch.Generator(device).manual_seed(0)
    merit = torch.rand(tokens, layer.experts, device=device, generator=generator).topk(layer.used)
    return merit.values, merit.indices.int().masked_fill_(merit.indices >= held, NOT_OWN)
