"""The interface of all kinds of experts' weights, however they are stored."""

from typing import Protocol

import torch


class ExpertsMethod(Protocol):
    """The products with the weights of a layer's experts: how these are held in memory and multiplied.

    A class of this kind has a class method for each way in which checkpoints store its weights.
    """

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the results of each token's experts, [T, hidden].

        x: [T, hidden]. weights: [T, count] float32. experts: [T, count] int32.
        """
