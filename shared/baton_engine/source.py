"""The source of the tensors that layers are built from, and the methods that read weights from it."""

from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol

import torch

from .config import ConfigError
from .experts_method import ExpertNames, ExpertsMethod
from .inputs import InputRows, Inputs
from .ops import Ops
from .shard import ALONE, Ranks, even_part, own_experts
from .stage import WHOLE, Stage


class Outputs(NamedTuple):
    """Consecutive outputs of a projection that a rank computes. size: how many outputs the projection has."""

    name: str
    size: int
    rows: slice


class Product(Protocol):
    """The product with a weight that is in memory."""

    @property
    def inputs(self) -> Inputs:
        """The form in which the product takes its inputs."""

    # Any: a plain tensor, or the form that `inputs` names.
    def __call__(self, x: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, inputs]. Returns [T, outputs], in out when given."""

    def gated(self, x: Any, activation: str, into: Inputs) -> InputRows:
        """Multiply as `__call__` does and return activation(gate) * up, [T, outputs / 2].

        The outputs are the gates, then as many ups. activation: a key of
        baton_kernels.reference.activation.ACTIVATIONS. into: the form that the next product takes.
        """


class Method(Protocol):
    """How a checkpoint stores the weight of a projection. Methods of projections that are stored alike are equal."""

    def load(
        self,
        source: "Source",
        taken: list[Outputs],
        inputs: int,
        columns: slice,
        bias: bool,
        order: Sequence[int] | None,
        transposed: bool,
    ) -> Product:
        """Read parts of projections, each [its outputs, inputs], and stack them along their outputs.

        taken: the outputs to read. columns: the inputs to read. order: for each output of the product, its index among
        the outputs taken; None = the same order. transposed: the checkpoint stores unquantized weights as [inputs,
        outputs]. Raises ConfigError for a tensor that is missing or has another shape or dtype.
        """

    def weight(self, source: "Source", taken: Outputs, inputs: int, columns: slice) -> torch.Tensor:
        """Return a part of the weight of one projection in the engine's dtype, [rows of the part, its columns]."""

    def experts(self, source: "Source", names: ExpertNames, experts: int, hidden: int, size: int) -> ExpertsMethod:
        """Read the projections of each expert, [outputs, inputs] each, whose names begin with the expert's number."""


class Policy(Protocol):
    """Decides how the weight of each projection is stored."""

    def __call__(self, name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        """Return the method of the projection with this full name.

        sensitive: as in Linear. stored: whether the checkpoint has a tensor of that name. Raises ConfigError if the
        projection is stored in a way that is not served.
        """


class Tensors(Protocol):
    """The tensors of a checkpoint. dtype: that of the engine. device: where `take` puts them.

    The methods are those of Weights.
    """

    dtype: torch.dtype
    device: torch.device

    def __contains__(self, name: str) -> bool: ...

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor: ...

    def stored_dtype(self, name: str) -> torch.dtype: ...

    def stored_shape(self, name: str) -> tuple[int, ...]: ...

    def leave(self, prefix: str, numbers: Collection[int]) -> None: ...


class Source:
    """The tensors of a checkpoint whose names begin with a prefix."""

    def __init__(
        self,
        weights: Tensors,
        ops: Ops,
        policy: Policy,
        prefix: str = "",
        ranks: Ranks = ALONE,
        expert_parallel: bool = False,
        stage: Stage = WHOLE,
    ) -> None:
        """ranks: those that divide each of the model's layers among them. expert_parallel: each rank has some of a
        layer's experts as a whole; otherwise it has some hidden units of every expert. stage: which layers are
        built."""
        self.ops = ops
        self.ranks = ranks
        self.stage = stage
        self._expert_parallel = expert_parallel
        self.dtype = weights.dtype
        self.device = weights.device
        self._weights = weights
        self._policy = policy
        self._prefix = prefix

    def at(self, name: str) -> "Source":
        """Return the source of the tensors whose names continue with `name` and a dot."""
        source = copy(self)
        source._prefix = f"{self._prefix}{name}."
        return source

    def reading(self, weights: Tensors) -> "Source":
        """Return a source with the same prefix that reads from other tensors."""
        source = copy(self)
        source._weights, source.dtype, source.device = weights, weights.dtype, weights.device
        return source

    def whole(self) -> "Source":
        """Return a source of what each rank computes as a whole."""
        source = copy(self)
        source.ranks, source._expert_parallel = ALONE, False
        return source

    def in_dtype(self, dtype: torch.dtype) -> "Source":
        """Return a source of what is computed in another dtype than the rest of the model."""
        source = copy(self)
        source.dtype = dtype
        return source

    def own_experts(self, experts: int) -> range:
        """Return the experts of which this rank has all or a part. experts: their number in a layer."""
        return own_experts(experts, self.ranks) if self._expert_parallel else range(experts)

    def own_units(self, size: int) -> slice:
        """Return the range of an expert's `size` hidden units that this rank has."""
        if self._expert_parallel:
            return slice(0, size)
        return even_part(size, self.ranks, "hidden units of an expert")

    def leave(self, numbers: Collection[int]) -> None:
        """Note that only other ranks take the tensors whose names continue with one of these numbers."""
        self._weights.leave(self._prefix, numbers)

    def __contains__(self, name: str) -> bool:
        return f"{self._prefix}{name}" in self._weights

    def methods(self, names: Sequence[str], sensitive: bool = False) -> list[Method]:
        """Return the method of each of these projections. sensitive: as in Linear."""
        return [self._method(name, sensitive) for name in names]

    def method(self, names: Sequence[str]) -> Method:
        """Return the method of projections that are multiplied together. Raises ConfigError if their methods differ."""
        first, *others = names
        method = self._method(first, False)
        for name in others:
            other = self._method(name, False)
            if other != method:
                raise ConfigError(
                    f"{self._prefix}{first} and {self._prefix}{name} are multiplied together, but are not stored "
                    f"alike: {method} and {other}"
                )
        return method

    def weight(
        self, name: str, outputs: int, inputs: int, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """Return the weight of one projection in the engine's dtype, [outputs, inputs], however it is stored.

        rows, columns: the part of it that is returned; None = all.
        """
        taken = Outputs(name, outputs, rows or slice(0, outputs))
        return self.method([name]).weight(self, taken, inputs, columns or slice(0, inputs))

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        part: tuple[slice, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return a tensor, or a part of it, as Weights.take does; in the engine's dtype unless another is given."""
        return self._weights.take(f"{self._prefix}{name}", shape, part, dtype or self.dtype)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the checkpoint, as Weights.stored_dtype does."""
        return self._weights.stored_dtype(f"{self._prefix}{name}")

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the checkpoint, as Weights.stored_shape does."""
        return self._weights.stored_shape(f"{self._prefix}{name}")

    def full_name(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _method(self, name: str, sensitive: bool) -> Method:
        return self._policy(f"{self._prefix}{name}", sensitive, self._weights.__contains__)
