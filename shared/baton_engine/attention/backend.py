"""The interface of attention implementations."""

import itertools
from bisect import bisect_left
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.kv_cache import KvCache

# Steps with prompts that have more chunks of several tokens than this use the pieces of token_graphs.py.
GRAPH_CHUNKS = 8
# So do those whose sequences have more tokens, for which attention cuts tiles (baton_kernels.prefill_cuts).
GRAPH_KEYS = 4096


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

    def split(self, at: int) -> tuple["AttentionBatch", "AttentionBatch"]:
        """Return the batches of the tokens before one of the step's tokens, and from this one on. at: its index, of
        which there are tokens on both sides. A sequence with tokens on both sides is in both batches."""
        count = bisect_left(self.starts, at)  # the sequences that begin before
        after = self.starts[count] - at
        lengths = [*self.lengths[: count - 1], self.lengths[count - 1] - after]
        first = AttentionBatch([*self.starts[:count], at], lengths, self.tables[:count])
        begun = count - 1 if after else count
        starts = [0, *(start - at for start in self.starts[begun + 1 :])]
        return first, AttentionBatch(starts, self.lengths[begun:], self.tables[begun:])

    @property
    def counts(self) -> list[int]:
        """The new tokens of each sequence."""
        return [end - start for start, end in itertools.pairwise(self.starts)]

    @property
    def decodes(self) -> int:
        """How many sequences come before the first one with several new tokens."""
        return next((index for index, count in enumerate(self.counts) if count > 1), len(self.lengths))


class StepLimits(msgspec.Struct, frozen=True):
    """The limits of a step. sequences: the most sequences. keys: the most tokens in the KV of one sequence, or the most
    tokens to compute if these are more. deterministic: a sequence's result must not depend on the other sequences."""

    sequences: int
    keys: int
    deterministic: bool = False


class AttentionBackend(Protocol):
    """Attends over the paged cache, which already holds the KV of the new tokens."""

    name: str

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        """specs: the variant of attention of each layer."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Called once a step, before the first layer."""

    def outputs(self, q: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor, not initialized, for the result of `attend` for queries q."""

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """q: [T, heads, head_dim], rotated. out: as from `outputs`, receives the result. T may exceed the number of the
        batch's tokens.

        sinks, up: the layer's weights that its AttentionSpec requires, always at the same addresses. sinks: [heads]
        float32. up: what turns latents into keys and values, as LatentSpec has it.
        """


class SelectingBackend(AttentionBackend, Protocol):
    """A backend for layers that attend only to selected tokens (IndexedLatentSpec, KeyBlockSpec)."""

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None) -> None:
        """Select the tokens that later calls of `attend` attend to, by their index keys in this layer's cache.

        queries: of the indexer, [T, index heads, index_dim], rotated. weights: of its heads, [T, index heads] float32;
        None = each head selects for itself (KeyBlockSpec).
        """


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose decode steps a CUDA graph can hold."""

    def use_rows(self, tables: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Prepare for decodes alone, one token of each row, whose tables are rows of a larger tensor; for capture in a
        graph.

        tables: [table rows, groups of layers, most blocks] int32. rows: [S] int64. lengths: [S] int32.
        """
