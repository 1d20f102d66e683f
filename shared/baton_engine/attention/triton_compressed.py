"""Compressed attention through our Triton kernels."""

import itertools
from typing import Any

import msgspec
import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.compressed_spec import CompressedSpec, Entries
from baton_engine.kv_cache import KvCache
from baton_engine.transfer import pack_to_device
from baton_kernels.decode_parts import DecodeParts, plan_parts
from baton_kernels.entry_slots import entry_slots
from baton_kernels.index_scores import index_scores, select_numbers
from baton_kernels.latent_decode import latent_decode, programs_per_part

from .backend import AttentionBatch, StepLimits
from .query_groups import group_queries

# The number of programs of the decode kernel that fills a device: two on each multiprocessor of an H200.
_PROGRAMS = 256
_TOKENS = 8  # queries of a chunk for which a program loads index keys once
# Queries whose slots and partial results are in memory at a time, except for decodes, which are all in one call.
_MOST_QUERIES = 256


class _Kind(msgspec.Struct, frozen=True):
    """What layers have in common that attend to as many entries. As in Entries; rate 0 = there are no entries."""

    rate: int = 0
    selected: int = 0


class _Call(msgspec.Struct):
    """Queries that attend in one call.

    queries: rows of the step's tokens. lengths: [queries] int32, the tokens that each query sees. rows: [queries]
    int64, of the tables. parts: by the kinds of layers, of what the queries attend to. tokens, firsts: of the groups
    whose index keys are scored, as index_scores has them. groups: their parts, by rates. numbers: the last selection,
    as select_numbers returns it.
    """

    queries: slice
    lengths: torch.Tensor
    rows: torch.Tensor
    parts: dict[_Kind, DecodeParts]
    tokens: int
    firsts: torch.Tensor | None
    groups: dict[int, DecodeParts]
    numbers: torch.Tensor | None = None


class TritonCompressed:
    """Each query has a list of the rows to which it attends, in place of a block table, and is a sequence of its own
    for the decode kernel of latent attention. So the queries of a chunk share keys in the L2 cache alone."""

    name = "triton"

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        self._cache, self._limits = cache, limits
        self._specs = {layer: spec for layer in cache.layers if isinstance(spec := specs[layer], CompressedSpec)}
        [(self._scale, self._window)] = {(spec.scale, spec.window) for spec in self._specs.values()}
        self._kinds = {self._kind(spec.entries) for spec in self._specs.values()}
        plane = cache.planes[0]
        self._page, self._dim = plane.shape[2], plane.shape[4]
        programs = max(_PROGRAMS // programs_per_part(num_heads, plane.element_size(), self._dim), 1)
        # With a capacity of one part, no sequence is divided.
        self._capacity = 1 if limits.deterministic else programs
        self._scored = 1 if limits.deterministic else _TOKENS
        self._none = torch.empty(0, dtype=torch.int32, device=cache.device)
        # A CUDA graph must not be the first to need these numbers, since its capture would leave them undefined.
        self._in_order = torch.arange(max(limits.sequences, _MOST_QUERIES), device=cache.device)
        self._tables: tuple[torch.Tensor, ...] = ()
        self._calls: list[_Call] = []

    def prepare(self, batch: AttentionBatch) -> None:
        decodes, starts = batch.decodes, batch.starts
        calls = [
            (index, first, min(first + _MOST_QUERIES, starts[index + 1]))
            for index in range(decodes, len(batch.lengths))
            for first in range(starts[index], starts[index + 1], _MOST_QUERIES)
        ]
        arrays = [array for call in calls for array in group_queries(batch, *call, self._scored)]
        uploaded = iter(pack_to_device([batch.tables.ravel(), batch.lengths, *arrays], self._cache.device))
        tables, all_lengths = itertools.islice(uploaded, 2)
        self._tables, self._calls = tables.view(batch.tables.shape).unbind(1), []
        if decodes:
            self._add_decodes(self._in_order[:decodes], all_lengths[:decodes])
        for _, first, _ in calls:
            lengths, rows, group_lengths, firsts, group_rows = itertools.islice(uploaded, 5)
            self._add_call(first, lengths, rows.long(), self._scored, firsts, group_lengths, group_rows.long())

    def use_rows(self, tables: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self._tables, self._calls = tables.unbind(1), []
        self._add_decodes(rows, lengths)

    def _add_decodes(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self._add_call(0, lengths, rows, 1, None, lengths, rows)

    def _add_call(
        self, first: int, lengths: torch.Tensor, rows: torch.Tensor, tokens: int, firsts: torch.Tensor | None,
        group_lengths: torch.Tensor, group_rows: torch.Tensor,
    ) -> None:  # fmt: skip
        parts, groups, own = {}, {}, self._in_order[: len(rows)]
        for kind in self._kinds:
            attended = lengths.clamp(max=self._window)
            if kind.rate:
                ended = lengths // kind.rate
                attended = attended + (ended.clamp(max=kind.selected) if kind.selected else ended)
            if kind.selected:
                ended = (group_lengths // kind.rate).int()
                groups[kind.rate] = plan_parts(ended, group_rows, self._capacity, self._none)
            parts[kind] = plan_parts(attended.int(), own, self._capacity, self._none)
        queries = slice(first, first + len(rows))
        self._calls.append(_Call(queries, lengths, rows, parts, tokens, firsts, groups))

    def _kind(self, entries: Entries | None) -> _Kind:
        if entries is None:
            return _Kind()
        # Where no sequence is so long that some entries are not selected, the indexer is not needed.
        return _Kind(entries.rate, entries.selected if self._limits.keys // entries.rate > entries.selected else 0)

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None) -> None:
        entries = self._specs[layer].entries
        assert entries is not None
        assert weights is not None
        if not self._kind(entries).selected:
            return
        rate, column = entries.rate, entries.index_column
        index_keys = self._cache.layer(entries.layer)[0][..., column : column + entries.index_dim]
        tables = self._tables[self._cache.group_of(entries.layer)]
        for call in self._calls:
            scores = index_scores(
                queries[call.queries], weights[call.queries], index_keys, tables, call.groups[rate],
                self._limits.keys // rate, call.tokens, call.firsts, rate,
            )  # fmt: skip
            ended = (call.lengths // rate).int()
            call.numbers = select_numbers(scores[:, None], ended, 1, entries.selected)

    def outputs(self, q: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(q, memory_format=torch.contiguous_format)

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        entries, keys = self._specs[layer].entries, self._tables[self._cache.group_of(layer)]
        kind, width = self._kind(entries), self._window
        found: dict[str, Any] = {}
        if entries is not None:
            tables = self._tables[self._cache.group_of(entries.layer)]
            row = self._first_row(entries.layer) + entries.place
            found = {"entry_tables": tables, "entry_row": row, "rate": entries.rate}
            width += kind.selected or self._limits.keys // entries.rate
        # Each row is a block of its own, so that the slots are the numbers of blocks.
        rows = self._cache.planes[0].view(-1, 1, 1, self._dim)
        for call in self._calls:
            numbers = call.numbers if kind.selected else None
            slots = entry_slots(
                call.lengths, call.rows, keys, self._first_row(layer), self._window, width, self._page, numbers=numbers,
                **found,
            )  # fmt: skip
            latent_decode(
                q[call.queries], rows, slots, call.parts[kind], self._scale, self._dim, sinks=sinks,
                out=out[call.queries],
            )  # fmt: skip

    def _first_row(self, layer: int) -> int:
        """Return the number of a layer's first row among those of all layers."""
        return self._cache.layer(layer)[0].storage_offset() // self._dim
