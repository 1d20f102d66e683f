"""The interface of attention implementations."""

from typing import Protocol

import msgspec
import numpy as np
import torch


class AttentionBatch(msgspec.Struct):
    """The sequences of one step. Their new tokens lie one after another in the model's inputs; those with one new token
    come first.

    starts: [S + 1], where each sequence's new tokens begin. lengths: [S], tokens in its KV after this step.
    tables: [S, groups of layers, at least the blocks of the longest] int32, block tables. What lies beyond a sequence's
    length or before a group's window means nothing.
    """

    starts: list[int]
    lengths: list[int]
    tables: np.ndarray


class AttentionBackend(Protocol):
    """Attends over the paged cache, which already holds the new tokens' keys and values."""

    name: str

    def prepare(self, batch: AttentionBatch) -> None:
        """Called once a step, before the first layer."""

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        """q: [T, heads, head_dim], rotated. out: of q's shape, contiguous, receives the result. T may exceed the number
        of the batch's tokens. sinks: [heads] float32, where the layer's AttentionSpec says that it has them."""
