"""Attention through the Triton kernels, which read the paged pool in place, and FlashAttention for long whole prompts.

cuDNN is twice as fast on these, but prepares a plan for every new length, for half a second.
"""

import itertools

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from baton_engine.kv_cache import KvCache
from baton_engine.transfer import to_device
from baton_kernels.decode_attention import decode_attention
from baton_kernels.paged_attention import AttentionVariant
from baton_kernels.prefill_attention import prefill_attention, prefill_tiles

from .backend import AttentionBatch

_QUERIES = 64
# From how many tokens on FlashAttention beats the flash kernel although it needs the keys in one piece.
_LEAST_WHOLE = 256


class TritonPaged:
    """Decodes go through the split-KV kernel, prefill chunks through the flash kernel, whole prompts through torch."""

    name = "triton"

    def __init__(self, cache: KvCache, num_heads: int, sliding_windows: tuple[int | None, ...]) -> None:
        self._cache = cache
        scale = cache.data.shape[-1] ** -0.5
        self._variants = [AttentionVariant(scale, window=window or 0) for window in sliding_windows]
        narrowest = min((window for window in sliding_windows if window is not None), default=None)
        fits = cache.data.dtype != torch.float32 and cache.data.shape[-1] in (64, 128)
        self._longest_whole = (1 << 30 if narrowest is None else narrowest) if fits else 0
        self._decodes = 0
        self._splits = 1
        self._wholes: list[tuple[slice, int]] = []  # rows of neighbours of one length, and that length
        self._tiles: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows: torch.Tensor | None = None

    def splits_for(self, sequences: int) -> int:
        """Return in how many parts each sequence's keys are cut, so that the device is full."""
        programs = sequences * self._cache.data.shape[4]
        splits = 1
        while splits < 32 and programs * splits < 512:
            splits *= 2
        return splits

    def prepare(self, batch: AttentionBatch) -> None:
        device = self._cache.data.device
        counts = [end - start for start, end in itertools.pairwise(batch.starts)]
        self._decodes = next((index for index, count in enumerate(counts) if count > 1), len(counts))
        self._splits = self.splits_for(max(self._decodes, 1))
        tables = np.zeros((len(counts), max(len(table) for table in batch.tables)), dtype=np.int32)
        for row, table in zip(tables, batch.tables, strict=True):
            row[: len(table)] = table
        self._tables = to_device(tables, device, torch.int32)
        self._lengths = to_device(batch.lengths, device, torch.int32)
        self._rows = None
        self._wholes, chunks = [], []
        for index in range(self._decodes, len(counts)):
            count, start, end = counts[index], batch.starts[index], batch.starts[index + 1]
            if count != batch.lengths[index] or not _LEAST_WHOLE <= count <= self._longest_whole:
                chunks.append(index)
            elif self._wholes and self._wholes[-1][0].stop == start and self._wholes[-1][1] == count:
                self._wholes[-1] = slice(self._wholes[-1][0].start, end), count
            else:
                self._wholes.append((slice(start, end), count))
        self._tiles = None
        if chunks:
            self._starts = to_device(batch.starts, device, torch.int32)
            sequences, rows = prefill_tiles(batch.starts, _QUERIES, chunks)
            self._tiles = to_device(sequences, device, torch.int32), to_device(rows, device, torch.int32)

    def use_rows(self, tables: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Prepare for decodes alone whose tables are rows of a larger tensor; for capture in a graph."""
        self._decodes, self._wholes, self._tiles = len(rows), [], None
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
        if self._tiles is not None:
            prefill_attention(
                q, keys, values, self._tables, self._lengths, self._starts, self._tiles, variant,
                out=out, block_queries=_QUERIES,
            )  # fmt: skip
        for rows, length in self._wholes:
            k, v = (x.flatten(0, 1).index_select(0, batch.slots[rows]) for x in (keys, values))
            q_first, k_first, v_first = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q[rows], k, v))
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                whole = scaled_dot_product_attention(q_first, k_first, v_first, is_causal=True, enable_gqa=True)
            out[rows] = whole.transpose(1, 2).flatten(0, 1)
        return out
