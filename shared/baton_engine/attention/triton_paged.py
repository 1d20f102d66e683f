"""Attention through the Triton kernels, which read the paged pool in place."""

import torch

from baton_engine.kv_cache import KvCache
from baton_kernels.decode_attention import decode_attention
from baton_kernels.paged_attention import AttentionVariant
from baton_kernels.prefill_attention import prefill_attention, prefill_tiles

from .backend import AttentionBatch

_QUERIES = 64


class TritonPaged:
    """Decodes go through the split-KV kernel, prefill chunks through the flash kernel."""

    name = "triton"

    def __init__(self, cache: KvCache, num_heads: int, sliding_windows: tuple[int | None, ...]) -> None:
        self._cache = cache
        scale = cache.data.shape[-1] ** -0.5
        self._variants = [AttentionVariant(scale, window=window or 0) for window in sliding_windows]
        self._decodes = 0
        self._chunks = 0
        self._splits = 1

    def splits_for(self, sequences: int) -> int:
        """Return in how many parts each sequence's keys are cut, so that the device is full."""
        programs = sequences * self._cache.data.shape[4]
        splits = 1
        while splits < 32 and programs * splits < 512:
            splits *= 2
        return splits

    def prepare(self, batch: AttentionBatch) -> None:
        device = self._cache.data.device
        counts = [end - start for start, end in zip(batch.starts, batch.starts[1:], strict=False)]
        self._decodes = next((index for index, count in enumerate(counts) if count > 1), len(counts))
        self._chunks = len(counts) - self._decodes
        self._splits = self.splits_for(max(self._decodes, 1))
        width = max(len(table) for table in batch.tables)
        ints = [entry for table in batch.tables for entry in (*table, *[0] * (width - len(table)))]
        ints += batch.lengths
        starts = [start - self._decodes for start in batch.starts[self._decodes :]]
        sequences, rows = prefill_tiles(starts, _QUERIES)
        ints += starts + sequences + rows
        packed = torch.tensor(ints, dtype=torch.int32).to(device, non_blocking=True)
        sizes = [len(counts) * width, len(counts), len(starts), len(sequences), len(rows)]
        tables, self._lengths, self._starts, *tiles = torch.split(packed, sizes)
        self._tables = tables.view(len(counts), width)
        self._tiles = tiles[0], tiles[1]
        self._rows: torch.Tensor | None = None

    def use_rows(self, tables: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Prepare for decodes alone whose tables are rows of a larger tensor; for capture in a graph."""
        self._decodes, self._chunks = len(rows), 0
        self._splits = self.splits_for(len(rows))
        self._tables, self._rows, self._lengths = tables, rows, lengths

    def attend(self, layer: int, q: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        keys, values = self._cache.layer(layer)
        out = torch.empty_like(q)
        variant, n = self._variants[layer], self._decodes
        if n:
            decode_attention(
                q[:n], keys, values, self._tables, self._lengths, variant, self._splits, rows=self._rows, out=out[:n]
            )
        if self._chunks:
            prefill_attention(
                q[n:], keys, values, self._tables[n:], self._lengths[n:], self._starts, self._tiles, variant,
                out=out[n:], block_queries=_QUERIES,
            )  # fmt: skip
        return out
