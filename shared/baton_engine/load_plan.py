"""Finds out which tensors a model takes, and in which order, without reading any."""

import logging
from collections.abc import Callable, Set
from typing import NamedTuple

import torch

from .loading import Weights
from .model_config import ModelConfig
from .models.registry import model_class
from .ops import TORCH
from .read_ahead import Range
from .source import Source

log = logging.getLogger(__name__)


class Take(NamedTuple):
    """A tensor that a model takes, or a part of it, as in Weights.take."""

    name: str
    shape: tuple[int, ...]
    part: tuple[slice, ...] | None
    dtype: torch.dtype


class _Notes:
    """Replaces Weights: notes what is taken, and returns tensors without memory. names: None = all exist."""

    device = torch.device("meta")

    def __init__(self, dtype: torch.dtype, names: Set[str] | None) -> None:
        self.dtype = dtype
        self.takes: list[Take] = []
        self._names = names

    def __contains__(self, name: str) -> bool:
        return self._names is None or name in self._names

    def take(
        self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor:
        self.takes.append(Take(name, shape, part, dtype))
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        return whole[part] if part else whole


def planned_takes(build: Callable[[Source], object], dtype: torch.dtype, names: Set[str] | None = None) -> list[Take]:
    """Return what a model takes from a checkpoint, in order.

    build: makes the model, and does not look at the values of its tensors. dtype: of the engine. names: of the
    checkpoint's tensors; None = there are all that the model can use.
    """
    notes = _Notes(dtype, names)
    build(Source(notes, TORCH))
    return notes.takes


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a checkpoint of a model has, by name."""
    takes = planned_takes(lambda source: model_class(model.architecture)(model, source, 1), torch.bfloat16)
    return {take.name: take.shape for take in takes}


def planned_ranges(build: Callable[[Source], object], weights: Weights) -> list[Range]:
    """Return what a model reads, in order. build: as in planned_takes.

    Raises ConfigError when a tensor is missing or has another shape: nobody waits for other tensors to learn it.
    """
    try:
        takes = planned_takes(build, weights.dtype, weights.names)
    except Exception as error:
        # The order only makes loading faster.
        log.warning("the weights are read one at a time, as their order is not known beforehand: %r", error)
        return []
    return [weights.range(take.name, take.shape, take.part) for take in takes]
