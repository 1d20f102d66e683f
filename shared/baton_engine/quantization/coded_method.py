"""The common part of the formats of quantized weights: projections are read in parts and multiplied as codes."""

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
import torch

from baton_engine.source import Outputs, Product, Source

from .dense import load_biases

# The part of one projection that a rank has.
PartT = TypeVar("PartT")


class CodedMethod(msgspec.Struct, Generic[PartT], frozen=True):
    """The part of a Method that does not depend on the kind of codes. Subclasses have the methods that raise here."""

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> PartT:
        """Return the rows and columns of a projection's weight, [outputs, inputs].

        transposed: as in Method. Formats store their codes in one way only, whichever way the family stores weights.
        """
        raise NotImplementedError

    def dense(self, part: PartT, dtype: torch.dtype) -> torch.Tensor:
        """Return a part's weight in a dtype, [outputs, inputs]."""
        raise NotImplementedError

    def product(
        self, parts: list[PartT], bias: torch.Tensor | None, order: Sequence[int] | None, source: Source
    ) -> Product:
        """Return the product with parts stacked along their outputs. bias: of these outputs. order: as in Method."""
        raise NotImplementedError

    def load(
        self,
        source: Source,
        taken: list[Outputs],
        inputs: int,
        columns: slice,
        bias: bool,
        order: Sequence[int] | None,
        transposed: bool,
    ) -> Product:
        """As in Method."""
        parts = self.read_all(source, taken, inputs, columns, transposed)
        return self.product(parts, load_biases(source, taken) if bias else None, order, source)

    def read_all(
        self, source: Source, taken: list[Outputs], inputs: int, columns: slice, transposed: bool = False
    ) -> list[PartT]:
        """Return a part for each projection."""
        return [self.read(source, name, size, inputs, rows, columns, transposed) for name, size, rows in taken]

    def weight(self, source: Source, taken: Outputs, inputs: int, columns: slice) -> torch.Tensor:
        """As in Method."""
        [part] = self.read_all(source, [taken], inputs, columns)
        return self.dense(part, source.dtype)
