"""Copies in 16 bits of the KV that a step's chunks see, for a kernel that reads no codes of 8 bits."""

import msgspec
import numpy as np
import torch

from baton_engine.kv_cache import KvCache
from baton_engine.transfer import pack_to_device, to_device
from baton_kernels.prefill_attention import prefill_tiles
from baton_kernels.reference.paged_attention import AttentionVariant
from baton_kernels.wide_blocks import widen_blocks

from .backend import GRAPH_CHUNKS, GRAPH_KEYS, AttentionBatch


class Round(msgspec.Struct):
    """Chunks whose copies are in memory at the same time.

    blocks: for each copied block, its sequence and its place in the sequence's table. tables: [sequences, most blocks]
    int32, the copies of each sequence's blocks. tiles: those of the chunks, as prefill_attention has them.
    """

    blocks: tuple[torch.Tensor, torch.Tensor]
    tables: torch.Tensor
    tiles: tuple[torch.Tensor, torch.Tensor]


class WideCopies:
    """The memory for the copies of one layer. Each layer of a step overwrites those of the layer before it.

    For a chunk of hundreds of tokens, copying takes much less time than a kernel for 16 bits saves.
    """

    def __init__(self, cache: KvCache, block_size: int, keys: int) -> None:
        """keys: the most tokens in the KV of one sequence."""
        self._device, self._block_size = cache.device, block_size
        of_one = -(-min(GRAPH_KEYS, keys) // block_size)
        self._most = max(-(-keys // block_size), GRAPH_CHUNKS * of_one)
        shape = self._most, block_size, *cache.planes[0].shape[3:]
        self._copies = [torch.zeros(shape, dtype=cache.dtype, device=cache.device) for _ in range(2)]
        # The unused tiles of a CUDA graph belong to one more chunk, which has no tokens.
        firsts, places = np.array([*range(GRAPH_CHUNKS), 0]) * of_one, np.arange(of_one)
        self._graph_tables = to_device(firsts[:, None] + places, cache.device, torch.int32)
        chunks = np.repeat(np.arange(GRAPH_CHUNKS), of_one)
        self._graph_blocks = pack_to_device([chunks, np.tile(places, GRAPH_CHUNKS)], cache.device)

    def of_graph(self, tiles: tuple[torch.Tensor, torch.Tensor]) -> list[Round]:
        """Return the round of a step in a CUDA graph, whose tiles are given."""
        chunks, places = self._graph_blocks
        return [Round((chunks, places), self._graph_tables, tiles)]

    def rounds(self, batch: AttentionBatch, first: int, queries: int) -> list[Round]:
        """Return the rounds of a step. first: the first sequence with tiles. queries: the most of a tile."""
        blocks = [-(-length // self._block_size) for length in batch.lengths]
        rounds, begin = [], first
        while begin < len(blocks):
            end, total = begin, 0
            while end < len(blocks) and total + blocks[end] <= self._most:
                total += blocks[end]
                end += 1
            rounds.append(
                self._round(begin, blocks[begin:end], prefill_tiles(batch.starts, queries, range(begin, end)))
            )
            begin = end
        return rounds

    def _round(self, begin: int, blocks: list[int], tiles: tuple[list[int], list[int]]) -> Round:
        """Return the round of the sequences from `begin` on. blocks: how many each of them has."""
        counts = np.array(blocks)
        firsts = np.cumsum(counts) - counts
        sequences = np.repeat(np.arange(begin, begin + len(counts)), counts)
        places = np.arange(counts.sum()) - np.repeat(firsts, counts)
        # Sequences before them have no tiles, so nothing reads their rows of the tables.
        columns = [sequences, places, np.concatenate([np.zeros(begin, dtype=np.int64), firsts])]
        owners, at, where, tile_sequences, tile_rows = pack_to_device([*columns, *tiles], self._device)
        width = torch.arange(max(blocks), dtype=torch.int32, device=self._device)
        return Round((owners, at), where[:, None] + width, (tile_sequences, tile_rows))

    def fill(
        self,
        round: Round,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor,
        scales: torch.Tensor,
        variant: AttentionVariant,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the blocks of a round, and return keys and values [blocks, block_size, kv_heads, dim] to which the
        round's tables refer. keys to variant: as prefill_attention has them."""
        wide_keys, wide_values = self._copies
        widen_blocks(keys, values, tables, lengths, starts, round.blocks, scales, variant, wide_keys, wide_values)
        return wide_keys, wide_values
