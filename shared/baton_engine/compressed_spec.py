"""Compressed attention: where a layer has its entries, and which of them a query attends to."""

import msgspec

from baton_kernels.reference.compression import window_rows

from .attention_spec import AttentionSpec


class Entries(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of a layer, each of which sums up a window of tokens (baton_kernels.reference.compression).

    layer: that of the cache, which several layers share. place: that of this layer's entry among the rows of a window.
    rate: tokens of a window. selected: the most entries that a query attends to; 0 = all, and there is no indexer.
    index_dim: elements of an indexer's key of an entry. These keys lie side by side in the last row of a window.
    """

    layer: int
    place: int
    rate: int
    selected: int = 0
    index_dim: int = 0

    @property
    def first_row(self) -> int:
        """The token of a window in whose row this layer's entry is."""
        return self.rate - window_rows(self.rate) + self.place

    @property
    def index_column(self) -> int:
        """Where an index key begins in its row."""
        return self.place * self.index_dim

    def most(self, tokens: int) -> int:
        """Return how many entries the last of so many tokens attends to."""
        there = tokens // self.rate
        return min(there, self.selected) if self.selected else there


class CompressedSpec(AttentionSpec, frozen=True, kw_only=True):
    """Attention whose heads share one vector of each token as its key and its value, over the tokens of a window and
    over entries that sum up all tokens (DeepSeek-AI, "DeepSeek-V4", 2026). entries: None = over the window alone."""

    window: int
    entries: Entries | None = None
