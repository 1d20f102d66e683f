"""The interface of all kinds of experts' weights that are in memory."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the parts of an expert."""

    gate: str
    up: str
    down: str


class ExpertsMethod(Protocol):
    """The products with the weights of a layer's experts: how these are held in memory and multiplied."""

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the results of each token's experts, [T, hidden], as far as this rank computes it.

        x: [T, hidden]. weights: [T, count] float32. experts: [T, count] int32, as Router returns them.
        """
