"""The products of a step that have no entry in the tuning tables, so that an engine can measure them."""

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
Config = LinearConfig | ExpertsConfig | None  # None = use a library (cuBLAS, CUTLASS)


class Kind(Protocol):
    """A kind of products with weights of one format. rows: the numbers of rows to measure. The result for each also
    serves all smaller numbers down to the one before it."""

    @property
    def rows(self) -> tuple[int, ...]: ...

    def format(self, weight: Any) -> str:
        """Return the name of a weight's format in the tables; "" = 16 bits."""

    def numbers(self, weight: Any) -> torch.Tensor:
        """Return the tensor of a weight's elements or codes."""

    def candidates(self, weight: Any, shape: Any, rows: int) -> list[Any]:
        """Return the configurations to measure."""

    @property
    def trusted(self) -> Any:
        """The configuration of a kernel that is known to be correct: all others must give the same results."""

    def inputs(self, weight: Any, shape: Any, rows: int) -> Any:
        """Return random rows in the form that the product takes. Zeros would be multiplied faster than real inputs."""

    def compute(self, weight: Any, shape: Any, inputs: Any, config: Any) -> torch.Tensor:
        """Return the product of such inputs."""


class Unmeasured(NamedTuple):
    """A product, and its weights in all layers."""

    kind: Kind
    shape: Shape
    weights: list[Any]

    def learn(self, choices: dict[int, Config]) -> None:
        """Use these configurations from now on. choices: by the most rows that each is for, in ascending order."""
        weight = self.weights[0]
        learn(self.kind.format(weight), self.shape, self.kind.numbers(weight).device, choices)


_found: dict[tuple[str, Shape], Unmeasured] | None = None


@contextmanager
def watching() -> Iterator[dict[tuple[str, Shape], Unmeasured]]:
    """Yield a dict that collects the unmeasured products computed in this context, by format and shape."""
    global _found
    _found = {}
    try:
        yield _found
    finally:
        _found = None


def watch(kind: Kind, weight: Any, shape: Shape) -> None:
    """Note that a product is being computed, in case `watching` collects it."""
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
    """Return random weights and experts of tokens, as a router returns them. held: how many experts this rank has."""
    generator = torch.Generator(device).manual_seed(0)
    merit = torch.rand(tokens, layer.experts, device=device, generator=generator).topk(layer.used)
    return merit.values, merit.indices.int().masked_fill_(merit.indices >= held, NOT_OWN)
