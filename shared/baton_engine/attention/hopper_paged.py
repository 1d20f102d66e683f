"""Attention as in triton_paged.py, with chunks through the kernel that is written for Hopper."""

import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.kv_cache import KvCache
from baton_kernels.hopper_prefill import hopper_prefill
from baton_kernels.prefill_cuts import TileCuts
from baton_kernels.reference.paged_attention import AttentionVariant

from .backend import GRAPH_CHUNKS, AttentionBatch, StepLimits
from .triton_paged import Tiles, TritonPaged
from .wide_copies import Round, WideCopies

# With fewer tiles, copying codes as numbers takes longer than this kernel saves.
_LEAST_TILES = 4


class HopperPaged(TritonPaged):
    """Decodes, and steps with tiles that are cut, go through the kernels of TritonPaged.

    So do the few tiles of short steps over a cache of codes. The kernel for Hopper computes many over copies in 16
    bits.
    """

    name = "hopper"
    # With fewer parts, whole tiles use enough of the device for this kernel to be faster than TritonPaged's with parts.
    _least_parts = 4

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        super().__init__(cache, num_heads, specs, limits)
        block_size = cache.planes[0].shape[2]
        self._copies = None if cache.scales is None else WideCopies(cache, block_size, limits.keys)
        self._rounds: list[Round] = []

    def prepare(self, batch: AttentionBatch) -> None:
        super().prepare(batch)
        if self._copies is not None:
            tiles = sum(-(-count // self.queries_per_tile) for count in batch.counts[self._decodes :])
            many = tiles >= _LEAST_TILES
            self._rounds = self._copies.rounds(batch, self._decodes, self.queries_per_tile) if many else []

    def add_chunks(self, tables: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, tiles: Tiles) -> None:
        super().add_chunks(tables, lengths, starts, tiles)
        if self._copies is not None:
            # Each chunk may need one tile more than its tokens fill.
            many = len(tiles[0]) >= _LEAST_TILES + GRAPH_CHUNKS
            self._rounds = self._copies.of_graph(tiles) if many else []

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
        if cuts is not None or (self._copies is not None and not self._rounds):
            super()._attend_tiles(q, keys, values, tables, tiles, variant, out, scales, cuts)
            return
        lengths, starts = self.lengths, self._starts
        if self._copies is None or scales is None:
            hopper_prefill(q, keys, values, tables, lengths, starts, tiles, variant, out)
            return
        for round in self._rounds:
            wide = self._copies.fill(round, keys, values, tables, lengths, starts, scales, variant)
            hopper_prefill(q, *wide, round.tables, lengths, starts, round.tiles, variant, out)
