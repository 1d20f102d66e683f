"""Attention through our Triton kernels, which read the paged cache in place."""

import dataclasses
import sys
from collections.abc import Sequence

import numpy as np
import torch
from triton.runtime import driver

from baton_engine.attention_spec import AttentionSpec
from baton_engine.kv_cache import KvCache
from baton_engine.transfer import pack_to_device
from baton_kernels.decode_attention import decode_attention
from baton_kernels.decode_parts import plan_parts
from baton_kernels.prefill_attention import prefill_attention, prefill_tiles, queries_per_tile
from baton_kernels.prefill_cuts import PROGRAMS, CutPlan, TileCuts, cut_tiles
from baton_kernels.reference.paged_attention import AttentionVariant

from .backend import AttentionBatch, StepLimits

# The number of programs of the decode kernel that fills a device.
_PROGRAMS = 512

Tiles = tuple[torch.Tensor, torch.Tensor]


class TritonPaged:
    """Single new tokens go through the split-KV kernel, longer chunks through the flash kernel.

    With `deterministic` all tokens go through the flash kernel, which adds up a query's keys in the same order in any
    batch: no tile is cut.

    tables, lengths: the step's block tables for each group of layers, and the tokens of its sequences, on the device.
    """

    name = "triton"
    # Tiles are cut only in steps in which at least one tile would have this many parts.
    _least_parts = 2

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        self._cache = cache
        self._deterministic = limits.deterministic
        kv_heads, self._value_dims = cache.planes[0].shape[3], cache.layout.value_dims
        # With `deterministic`, single tokens take a whole tile too, so that a smaller tile wastes less.
        widest = max(*self._value_dims, *self._value_dims.values())
        per_tile = queries_per_tile(widest, cache.dtype.itemsize, _shared_memory(cache.device))
        self.queries_per_tile = 64 if limits.deterministic else per_tile
        variants = {spec: _variant(spec, cache.device) for spec in set(specs)}
        self._variants = [variants[spec] for spec in specs]
        self._decodes = 0
        self._capacity = max(_PROGRAMS // kv_heads, 1)
        # Graphs keep its address, so it is never replaced.
        self._arrivals = torch.zeros(limits.sequences * kv_heads, dtype=torch.int32, device=cache.device)
        self._reaches = {spec.reach for spec in specs}
        self._tile_capacity = max(PROGRAMS // num_heads, 1)
        # Keyed by the `reach` of a spec, which decides how many keys a tile has.
        self._tiles: dict[tuple[int, bool], tuple[Tiles, TileCuts | None]] = {}
        # [sequences, most blocks] for each group of layers. Views made anew for each layer would slow down short steps.
        self.tables: tuple[torch.Tensor, ...] = ()
        self._chunk_tables: tuple[torch.Tensor, ...] = ()
        self._rows = self._in_order = torch.empty(0, dtype=torch.int64, device=cache.device)

    def prepare(self, batch: AttentionBatch) -> None:
        self._decodes, chunks = self._work(batch)
        tiles = prefill_tiles(batch.starts, self.queries_per_tile, chunks)
        cuts = {} if self._deterministic else self._cuts(batch, tiles)
        parts: list[np.ndarray | list[int]] = [batch.tables.ravel(), batch.lengths, batch.starts, *tiles]
        for plan in cuts.values():
            parts += plan.columns
        flat, self.lengths, self._starts, sequence_of, row_of, *columns = pack_to_device(parts, self._cache.device)
        self.tables = self._chunk_tables = flat.view(batch.tables.shape).unbind(1)
        self._tiles = dict.fromkeys(self._reaches, ((sequence_of, row_of), None)) if tiles[0] else {}
        uploaded = iter(columns)
        for reach, plan in cuts.items():
            cut = next(uploaded), next(uploaded)
            self._tiles[reach] = cut, TileCuts(next(uploaded).view(3, -1), next(uploaded), plan.slots)
        if len(self._in_order) < self._decodes:
            self._in_order = torch.arange(max(self._decodes, 1024), device=self._cache.device)
        self._rows = self._in_order
        self._plan()

    def _work(self, batch: AttentionBatch) -> tuple[int, Sequence[int]]:
        """Return how many sequences, the first ones, go through the split-KV kernel, and which go through the other."""
        decodes = 0 if self._deterministic else batch.decodes
        return decodes, range(decodes, len(batch.lengths))

    def _cuts(self, batch: AttentionBatch, tiles: tuple[list[int], list[int]]) -> dict[tuple[int, bool], CutPlan]:
        """Return the plans by which tiles are cut, by `reach` of the specs that need one."""
        plans = {
            (window, chunked): cut_tiles(
                tiles,
                batch.starts,
                batch.lengths,
                self.queries_per_tile,
                window,
                self._tile_capacity,
                self._least_parts,
                chunked,
            )
            for window, chunked in self._reaches
        }
        return {reach: plan for reach, plan in plans.items() if plan is not None}

    def use_rows(self, tables: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self._decodes, self._tiles = len(rows), {}
        self.tables, self._rows, self.lengths = tables.unbind(1), rows, lengths
        self._plan()

    def add_chunks(self, tables: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, tiles: Tiles) -> None:
        """Prepare for chunks of several tokens as well, after `use_rows`; for capture in a graph.

        tables, lengths, starts: as AttentionBatch has them, of the chunks alone, on the device. tiles: of
        queries_per_tile rows, as prefill_attention has them.
        """
        self._tiles = dict.fromkeys(self._reaches, (tiles, None))
        self._chunk_tables, self.lengths, self._starts = tables.unbind(1), lengths, starts

    def _plan(self) -> None:
        if self._decodes:
            lengths, rows = self.lengths[: self._decodes], self._rows[: self._decodes]
            self._parts = plan_parts(lengths, rows, self._capacity, self._arrivals)

    def outputs(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], self._value_dims[q.shape[2]])

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        keys, values = self._cache.layer(layer)[:2]
        group = self._cache.group_of(layer)
        variant, n = self._variants[layer], self._decodes
        if variant.sinks is not sinks:
            # A layer passes the same tensor in each step.
            variant = self._variants[layer] = dataclasses.replace(variant, sinks=sinks)
        scales = None if self._cache.scales is None else self._cache.scales[layer]
        if n:
            decode_attention(q[:n], keys, values, self.tables[group], variant, self._parts, out[:n], scales=scales)
        if self._tiles:
            tiles, cuts = self._tiles[variant.window, variant.chunked]
            self._attend_tiles(q, keys, values, self._chunk_tables[group], tiles, variant, out, scales, cuts)

    def _attend_tiles(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        tiles: Tiles,
        variant: AttentionVariant,
        out: torch.Tensor,
        scales: torch.Tensor | None,
        cuts: TileCuts | None,
    ) -> None:
        """Compute the queries of tiles, as prefill_attention has them."""
        prefill_attention(
            q, keys, values, tables, self.lengths, self._starts, tiles, variant,
            out=out, block_queries=self.queries_per_tile, uniform=self._deterministic,
            scales=scales, cuts=cuts,
        )  # fmt: skip


def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program can have. Triton's interpreter has no limit."""
    if device.type != "cuda":
        return sys.maxsize
    properties = driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


def _variant(spec: AttentionSpec, device: torch.device) -> AttentionVariant:
    alibi = None if spec.alibi is None else torch.tensor(spec.alibi, dtype=torch.float32, device=device)
    return AttentionVariant(
        spec.scale, spec.window or 0, spec.softcap, alibi, chunked=spec.chunked, rounded_alibi=spec.rounded_alibi
    )
