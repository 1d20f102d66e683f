"""Attention over selected blocks of keys through our Triton kernels."""

import itertools
from collections.abc import Sequence

import msgspec
import torch

from baton_engine.attention_spec import AttentionSpec, KeyBlockSpec
from baton_engine.kv_cache import KvCache
from baton_engine.transfer import pack_to_device
from baton_kernels.decode_attention import decode_attention
from baton_kernels.decode_parts import DecodeParts, plan_parts
from baton_kernels.key_blocks import key_block_scores, select_block_slots, selected_keys
from baton_kernels.reference.paged_attention import AttentionVariant

from .backend import AttentionBatch, StepLimits
from .query_groups import group_queries
from .triton_paged import TritonPaged

_TOKENS = 8  # queries of a chunk for which a program loads index keys once
# Queries whose slots and partial results are in memory at a time, except for decodes, which are all in one call.
_MOST_QUERIES = 256
# The number of programs of the decode kernel that fills a device.
_PROGRAMS = 512


class _Selected(msgspec.Struct):
    """Queries that attend to selected keys in one call.

    queries: rows of the step's tokens. lengths: [queries] int32, the tokens that each query sees. rows: [queries]
    int64, of the tables. tokens, firsts, groups: of the groups whose blocks are scored, as key_block_scores has them.
    parts: of the selected keys of each key-value head of each query. slots: the last selection, as select_block_slots
    returns it.
    """

    queries: slice
    lengths: torch.Tensor
    rows: torch.Tensor
    tokens: int
    firsts: torch.Tensor | None
    groups: DecodeParts
    parts: DecodeParts
    slots: torch.Tensor | None = None


class _ShortChunks(TritonPaged):
    """Computes the chunks of short sequences alone."""

    def __init__(
        self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits, most: int
    ) -> None:
        """most: the tokens of such a sequence."""
        super().__init__(cache, num_heads, specs, limits)
        self._most = most

    def chunks(self, batch: AttentionBatch) -> list[int]:
        """Return the sequences whose chunks are computed."""
        return [index for index in range(batch.decodes, len(batch.lengths)) if batch.lengths[index] <= self._most]

    def _work(self, batch: AttentionBatch) -> tuple[int, Sequence[int]]:
        return 0, self.chunks(batch)


class TritonKeyBlocks:
    """Layers that select nothing, and chunks whose sequences are so short that all their keys are selected, are
    computed as in TritonPaged. In other layers each key-value head of a token is a sequence of its own for the decode
    kernel. Its block table is a list of slots, and a slot is a block of one token of one head.

    The queries of a long chunk thus share no keys but those in the L2 cache. With `deterministic` short chunks are
    computed like long ones, so that a token does not depend on the chunk around it, and no sequence is divided.
    """

    name = "triton"

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        [spec] = {spec for spec in specs if isinstance(spec, KeyBlockSpec)}
        self._cache, self._limits, self._spec = cache, limits, spec
        self._kv_heads = cache.planes[0].shape[3]
        self._variant = AttentionVariant(spec.scale)
        self._all = TritonPaged(cache, num_heads, specs, limits)
        self._short = _ShortChunks(cache, num_heads, specs, limits, 0 if limits.deterministic else spec.selected)
        # The layers that select, unless no sequence can have more keys than are selected.
        selects = limits.keys > spec.selected
        self._selecting = {layer for layer in cache.layers if selects and isinstance(specs[layer], KeyBlockSpec)}
        # With a capacity of one part, no sequence is divided.
        self._capacity = 1 if limits.deterministic else _PROGRAMS
        self._scored = 1 if limits.deterministic else _TOKENS
        self._none = torch.empty(0, dtype=torch.int32, device=cache.device)
        most = max(limits.sequences, _MOST_QUERIES) * self._kv_heads
        # Graphs keep the addresses of these. A graph's capture would also leave new numbers undefined.
        self._arrivals = torch.zeros(most, dtype=torch.int32, device=cache.device)
        self._in_order = torch.arange(most, device=cache.device)
        self._has_short = False
        self._selected: list[_Selected] = []

    def prepare(self, batch: AttentionBatch) -> None:
        self._all.prepare(batch)
        self._selected, self._has_short = [], False
        if not self._selecting:
            return
        decodes, short = batch.decodes, self._short.chunks(batch)
        if short:
            self._short.prepare(batch)
            self._has_short = True
        if decodes:
            self._add_decodes(self._in_order[:decodes], self._all.lengths[:decodes])
        calls = [
            (index, first, min(first + _MOST_QUERIES, batch.starts[index + 1]))
            for index in range(decodes, len(batch.lengths))
            if index not in short
            for first in range(batch.starts[index], batch.starts[index + 1], _MOST_QUERIES)
        ]
        arrays = [array for call in calls for array in group_queries(batch, *call, self._scored)]
        uploaded = iter(pack_to_device(arrays, self._cache.device) if arrays else [])
        for _, first, end in calls:
            lengths, rows, group_lengths, firsts, group_rows = itertools.islice(uploaded, 5)
            groups = plan_parts(group_lengths, group_rows.long(), self._capacity, self._none)
            self._add_call(slice(first, end), lengths, rows.long(), self._scored, firsts, groups)

    def use_rows(self, tables: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self._all.use_rows(tables, rows, lengths)
        self._selected, self._has_short = [], False
        if self._selecting:
            self._add_decodes(rows, lengths)

    def _add_decodes(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        groups = plan_parts(lengths, rows, self._capacity, self._none)
        self._add_call(slice(0, len(rows)), lengths, rows, 1, None, groups)

    def _add_call(
        self, queries: slice, lengths: torch.Tensor, rows: torch.Tensor, tokens: int, firsts: torch.Tensor | None,
        groups: DecodeParts,
    ) -> None:  # fmt: skip
        keys = selected_keys(lengths, self._spec.block_keys, self._spec.selected_blocks)
        each = keys[:, None].expand(-1, self._kv_heads).flatten().contiguous()
        parts = plan_parts(each, self._in_order[: len(each)], self._capacity, self._arrivals)
        self._selected.append(_Selected(queries, lengths, rows, tokens, firsts, groups, parts))

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None) -> None:
        spec, index_keys = self._spec, self._cache.layer(layer)[2]
        tables, width = self._all.tables[self._cache.group_of(layer)], -(-self._limits.keys // spec.block_keys)
        for call in self._selected:
            scores = key_block_scores(
                queries[call.queries], index_keys, tables, call.groups, width, spec.block_keys, spec.local_blocks,
                call.tokens, call.firsts,
            )  # fmt: skip
            call.slots = select_block_slots(
                scores, call.lengths, call.rows, tables, index_keys.shape[1], spec.block_keys, spec.selected_blocks
            )

    def outputs(self, q: torch.Tensor) -> torch.Tensor:
        return self._all.outputs(q)

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if layer not in self._selecting:
            self._all.attend(layer, q, out, sinks)
            return
        if self._has_short:
            self._short.attend(layer, q, out, sinks)
        keys, values = (plane.view(-1, 1, 1, plane.shape[3]) for plane in self._cache.layer(layer)[:2])
        for call in self._selected:
            assert call.slots is not None
            grouped, results = (x[call.queries].reshape(len(call.slots), -1, x.shape[2]) for x in (q, out))
            # The kernel before it has written the slots.
            decode_attention(
                grouped, keys, values, call.slots, self._variant, call.parts, results, scales=None, early=False
            )
