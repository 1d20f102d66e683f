"""The products that a step computes and no table has, so that an engine can measure them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from .kernel_configs import ExpertLayer, ExpertsConfig, LinearConfig, Product
from .reference.routing import NOT_OWN
from .tuning import is_known, learn
from .unmeasured import has_rules

Shape = Product | ExpertLayer
Config = LinearConfig | ExpertsConfig | None  # None = by a library


class Kind(Protocol):
    """A kind of products, with weights of one format. rows: the numbers of rows to measure, each for all smaller
    numbers, too."""

    @property
    def rows(self) -> tuple[int, ...]: ...

    def format(self, weight: Any) -> str:
        """Return what tables call the format of a weight; "" = 16 bits."""

    def numbers(self, weight: Any) -> torch.Tensor:
        """Return the numbers or codes of a weight."""

    def candidates(self, weight: Any, shape: Any, rows: int) -> list[Any]:
        """Return the configurations that are worth measuring."""

    @property
    def trusted(self) -> Any:
        """The configuration of a kernel that is known to be right: all others must have the same results."""

    def inputs(self, weight: Any, shape: Any, rows: int) -> Any:
        """Return so many random rows, as the product takes them. Tensor cores multiply zeros faster than these."""

    def compute(self, weight: Any, shape: Any, inputs: Any, config: Any) -> torch.Tensor:
        """Return the product of such inputs."""


class Unmeasured(NamedTuple):
    """A product, and its weights in all layers."""

    kind: Kind
    shape: Shape
    weights: list[Any]

    def learn(self, choices: dict[int, Config]) -> None:
        """Take these configurations from now on. choices: by the most rows that each is for, in ascending order."""
        weight = self.weights[0]
        learn(self.kind.format(weight), self.shape, self.kind.numbers(weight).device, choices)


_found: dict[tuple[str, Shape], Unmeasured] | None = None


@contextmanager
def watching() -> Iterator[dict[tuple[str, Shape], Unmeasured]]:
    """Yield the products that are computed in this context and are worth measuring, by format and shape."""
    global _found
    _found = {}
    try:
        yield _found
    finally:
        _found = None


def watch(kind: Kind, weight: Any, shape: Shape) -> None:
    """Note that a product is computed."""
    if _found is None:
        return
    format, device = kind.format(weight), kind.numbers(weight).device
    inner = (shape.inner,) if isinstance(shape, Product) else (shape.hidden, shape.size)
    if is_known(format, shape, device) or not all(has_rules(each, device) for each in inner):
        return
    weights = _found.setdefault((format, shape), Unmeasured(kind, shape, [])).weights
    if all(kind.numbers(other) is not kind.numbers(weight) for other in weights):
        weights.append(weight)


def random_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return rows of the standard normal distribution."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(rows, columns, device=device, generator=generator).to(dtype)


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
