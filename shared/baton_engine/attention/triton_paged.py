"""Attention through the Triton kernels, which read the paged pool in place, and cuDNN for long whole prompts."""

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
# From how many tokens on cuDNN beats the flash kernel although it needs the keys in one piece.
_LEAST_WHOLE = 256


class TritonPaged:
    """Decodes go through the split-KV kernel, prefill chunks through the flash kernel, whole prompts through cuDNN."""

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
        self._wholes: list[slice] = []
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
            if counts[index] == batch.lengths[index] and _LEAST_WHOLE <= counts[index] <= self._longest_whole:
                self._wholes.append(slice(batch.starts[index], batch.starts[index + 1]))
            else:
                chunks.append(index)
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
        for rows in self._wholes:
            k, v = (x.flatten(0, 1).index_select(0, batch.slots[rows]) for x in (keys, values))
            q_first, k_first, v_first = (x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k, v))
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
                whole = scaled_dot_product_attention(q_first, k_first, v_first, is_causal=True, enable_gqa=True)
            out[rows] = whole.squeeze(0).transpose(0, 1)
        return out
