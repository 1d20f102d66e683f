"""What the model asks of an attention implementation."""

from typing import Protocol

import msgspec
import torch


class AttentionBatch(msgspec.Struct):
    """The sequences of one step. Their new tokens lie one after another in the model's inputs.

    starts: [S + 1], where each sequence's new tokens begin. lengths: [S], tokens in its KV after this step.
    tables: its blocks. slots: [T] int64, block * block_size + offset, where each new token's KV goes.
    """

    starts: list[int]
    lengths: list[int]
    tables: list[list[int]]
    slots: torch.Tensor


class AttentionBackend(Protocol):
    """Attends over the paged pool, which has the new tokens' keys and values already."""

    name: str

    def prepare(self, batch: AttentionBatch) -> None:
        """Called once a step, before the first layer."""

    def attend(self, layer: int, q: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """q: [T, heads, head_dim], rotated. Returns the same shape, contiguous."""
