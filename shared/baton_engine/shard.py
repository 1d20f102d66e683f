"""Which part of a layer a rank computes, and how the parts of all ranks become the result (Shoeybi et al.,
"Megatron-LM", 2019)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .config import ConfigError


class Place(Protocol):
    """rank: the number of a process among those that divide each layer. count: how many there are."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...


@dataclass(frozen=True)
class RankNumber:
    """Implements Place."""

    rank: int
    count: int


class Ranks(Place, Protocol):
    """The processes that divide each layer among them, as one of them sees them.

    All ranks call the methods in the same order, with tensors of the same shape. Each result is the same on all ranks,
    to the bit.
    """

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' y, which must be contiguous and may be overwritten."""

    def join(self, y: torch.Tensor) -> torch.Tensor:
        """Return the ranks' y [T, n] side by side, [T, count * n]."""

    def in_turn(self, passes: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Return the results of passes of a model. While a sum of one pass is under way, the next one goes on."""

    def least(self, value: int) -> int:
        """Return the least of the ranks' values. It is for decisions that all ranks must take alike."""


class OneRank:
    """A process that computes whole layers."""

    rank = 0
    count = 1

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def join(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def in_turn(self, passes: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        return [each() for each in passes]

    def least(self, value: int) -> int:
        return value


ALONE = OneRank()


def even_part(size: int, ranks: Place, what: str) -> slice:
    """Return this rank's part of `size` equal things. what: their name. Raises ConfigError if parts would differ."""
    if size % ranks.count:
        raise ConfigError(
            f"{size} {what} cannot be divided among {ranks.count} ranks: --tensor-parallel must divide it"
        )
    each = size // ranks.count
    return slice(ranks.rank * each, (ranks.rank + 1) * each)


def own_experts(experts: int, ranks: Place) -> range:
    """Return the experts of a layer that this rank has if experts go to ranks as a whole. Ranks have equally many, or
    some have one more than others. Raises ConfigError if a rank would have none."""
    if experts < ranks.count:
        raise ConfigError(f"--expert-parallel cannot divide the {experts} experts of a layer among {ranks.count} ranks")
    return range(ranks.rank * experts // ranks.count, (ranks.rank + 1) * experts // ranks.count)


def head_part(heads: int, ranks: Place, what: str = "heads") -> slice:
    """Return the heads that this rank has. Where there are fewer heads than ranks, several ranks have the same head."""
    if heads < ranks.count and ranks.count % heads == 0:
        head = ranks.rank * heads // ranks.count
        return slice(head, head + 1)
    return even_part(heads, ranks, what)


class Shard(Protocol):
    """adds_bias: whether this rank adds the layer's bias."""

    adds_bias: bool

    def outputs(self, sizes: Sequence[int]) -> list[slice]:
        """Return which outputs of each of the stacked projections this rank computes. sizes: of the projections."""

    def inputs(self, size: int) -> slice:
        """Return which of `size` inputs this rank multiplies."""

    def join(self, y: torch.Tensor) -> torch.Tensor:
        """Return the layer's result. y: the part that this rank has computed, [T, outputs of this rank]."""


class Replicated:
    """Each rank computes the whole layer."""

    adds_bias = True

    def outputs(self, sizes: Sequence[int]) -> list[slice]:
        return [slice(0, size) for size in sizes]

    def inputs(self, size: int) -> slice:
        return slice(0, size)

    def join(self, y: torch.Tensor) -> torch.Tensor:
        return y


REPLICATED = Replicated()


class Partial(Replicated):
    """Each rank multiplies its own part of a sum with the whole weight, and the caller adds up the results."""

    def __init__(self, ranks: Place) -> None:
        self.adds_bias = ranks.rank == 0


class Columns(Replicated):
    """Each rank computes a part of the outputs of each projection, and the results stay apart."""

    def __init__(self, ranks: Ranks, what: str = "hidden units") -> None:
        """what: the name of the outputs."""
        self._ranks, self._what = ranks, what

    def outputs(self, sizes: Sequence[int]) -> list[slice]:
        return [even_part(size, self._ranks, self._what) for size in sizes]


class Heads(Replicated):
    """Each rank computes some heads of each projection, and the results stay apart.

    dim: outputs of a head. divided: how many of the projections have heads, the first ones; None = all. Each rank
    computes the others as a whole. last_dim: outputs of a head in the last projection that has heads; None = dim.
    """

    def __init__(self, ranks: Ranks, dim: int, divided: int | None = None, last_dim: int | None = None) -> None:
        self._ranks, self._dim, self._divided, self._last_dim = ranks, dim, divided, last_dim or dim

    def outputs(self, sizes: Sequence[int]) -> list[slice]:
        divided = len(sizes) if self._divided is None else self._divided
        dims = [*(self._dim for _ in sizes[1:divided]), self._last_dim]
        parts = [head_part(size // dim, self._ranks) for size, dim in zip(sizes, dims, strict=False)]
        return [
            *(slice(part.start * dim, part.stop * dim) for part, dim in zip(parts, dims, strict=True)),
            *(slice(0, size) for size in sizes[divided:]),
        ]


class Rows(Replicated):
    """Each rank multiplies a part of the inputs, and the results are added up.

    joins: False = the caller adds them up.
    """

    def __init__(self, ranks: Ranks, joins: bool = True) -> None:
        self.adds_bias = ranks.rank == 0
        self._ranks, self._joins = ranks, joins

    def inputs(self, size: int) -> slice:
        return even_part(size, self._ranks, "inputs")

    def join(self, y: torch.Tensor) -> torch.Tensor:
        return self._ranks.sum(y) if self._joins else y
