"""Projections with the same inputs that no single product can compute."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from baton_engine.inputs import NUMBERS, InputRows, Inputs
from baton_engine.source import Product, Source

Part = TypeVar("Part")


class SideBySide:
    """The results of several products, one after another and then in the order that Method.load is asked for."""

    # The products may round their inputs in different ways.
    inputs: Inputs = NUMBERS

    def __init__(self, products: Sequence[Product], source: Source, order: Sequence[int] | None) -> None:
        self._products = products
        self._ops = source.ops
        self._order = None if order is None else torch.tensor(order, device=source.device)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        results = [product(x) for product in self._products]
        if self._order is None:
            return torch.cat(results, dim=1, out=out)
        return torch.index_select(torch.cat(results, dim=1), 1, self._order, out=out)

    def gated(self, x: torch.Tensor, activation: str, into: Inputs) -> InputRows:
        return into.gate(self._ops, self(x), activation)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors that may be absent are equal. Tensors without values count as equal."""
    if one is None or other is None:
        return one is other
    return one.is_meta or torch.equal(one, other)


def merge(parts: list[Part], alike: Callable[[Part, Part], bool]) -> list[list[Part]]:
    """Return the parts in order, in runs whose members are alike."""
    runs = [[parts[0]]]
    for part in parts[1:]:
        if alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs
