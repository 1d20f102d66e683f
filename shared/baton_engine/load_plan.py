"""Finds out which tensors a model takes, and in which order, without reading any."""

import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec
import torch

from .config import ConfigError
from .loading import Weights
from .model_config import ModelConfig
from .models.model import Model
from .models.registry import model_class
from .ops import TORCH, Ops
from .quantization.dense import as_stored
from .read_ahead import Range
from .shard import ALONE, Ranks
from .source import Policy, Source, Tensors
from .stage import WHOLE, Stage

log = logging.getLogger(__name__)

# The tensors that are taken do not depend on this dtype. Decoding those of thousands of experts would take a minute,
# even without memory.
_OPS = msgspec.structs.replace(TORCH, keeps_codes=True)

# Makes a model, and does not look at the values of its tensors.
Build = Callable[[Tensors, Ops], Model]


class Take(NamedTuple):
    """A tensor that a model takes, or a part of it, as in Weights.take."""

    name: str
    shape: tuple[int, ...]
    part: tuple[slice, ...] | None
    dtype: torch.dtype


class _Notes:
    """Replaces Weights: notes what is taken, and returns tensors without memory.

    weights: those that are replaced; None = there are all that a model can use.
    """

    device = torch.device("meta")

    def __init__(self, dtype: torch.dtype, weights: Weights | None) -> None:
        self.dtype = dtype
        self.takes: list[Take] = []
        self._weights = weights

    def __contains__(self, name: str) -> bool:
        return self._weights is None or name in self._weights

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        self.takes.append(Take(name, shape, part, dtype))
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        return whole[part] if part else whole

    def stored_dtype(self, name: str) -> torch.dtype:
        return self.dtype if self._weights is None else self._weights.stored_dtype(name)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return (1,) if self._weights is None else self._weights.stored_shape(name)

    def leave(self, prefix: str, numbers: Collection[int]) -> None:
        pass


def planned_takes(build: Build, dtype: torch.dtype, weights: Weights | None = None) -> list[Take]:
    """Return what a model takes, in order. dtype: of the engine. weights: None = there are all that it can use."""
    notes = _Notes(dtype, weights)
    build(notes, _OPS)
    return notes.takes


def build_of(
    model: ModelConfig,
    max_positions: int,
    policy: Policy = as_stored,
    ranks: Ranks = ALONE,
    expert_parallel: bool = False,
    stage: Stage = WHOLE,
) -> Build:
    """Return a model's constructor. max_positions: the most tokens of a sequence. policy: how weights are stored.

    ranks: those that divide the layers; what is made is the part of one of them. expert_parallel: as in Source. stage:
    which layers are made.
    """
    kind = model_class(model.architecture)

    def build(tensors: Tensors, ops: Ops) -> Model:
        source = Source(tensors, ops, policy, ranks=ranks, expert_parallel=expert_parallel, stage=stage)
        return kind(model, source, max_positions)

    return build


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a checkpoint of a model has, by name."""
    return {take.name: take.shape for take in planned_takes(build_of(model, 1), torch.bfloat16)}


def planned_ranges(build: Build, weights: Weights) -> list[Range]:
    """Return what a model reads, in order.

    Raises ConfigError when a tensor is missing or has another shape, before any tensor is read.
    """
    try:
        takes = planned_takes(build, weights.dtype, weights)
    except ConfigError:
        raise
    except Exception as error:
        # The order only makes loading faster.
        log.warning("the weights are read one at a time, as their order is not known beforehand: %r", error)
        return []
    return [weights.range(*take) for take in takes]
