"""Latent attention over selected tokens through our Triton kernels."""

import itertools

import msgspec
import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.kv_cache import KvCache
from baton_engine.latent_spec import IndexedLatentSpec
from baton_engine.transfer import pack_to_device
from baton_kernels.decode_parts import DecodeParts, plan_parts
from baton_kernels.head_products import absorb_queries, values_of
from baton_kernels.index_pools import pool_slots
from baton_kernels.index_scores import index_scores, select_numbers, select_slots
from baton_kernels.latent_decode import latent_decode

from .backend import AttentionBatch, StepLimits
from .query_groups import group_queries
from .triton_latent import TritonLatent

_TOKENS = 8  # queries of a chunk for which a program loads keys once
# Queries whose scores and partial results are in memory at a time, except for decodes, which are all in one call.
_MOST_QUERIES = 256


class _Selected(msgspec.Struct):
    """Queries that attend to selected tokens in one call.

    queries: rows of the step's tokens. lengths: [queries] int32, the tokens that each query sees. rows: [queries]
    int64, of the tables. tokens, firsts, groups: of the groups of queries whose keys are scored, as index_scores has
    them. parts: of the tokens that the queries attend to. numbers: the last selection, as select_numbers returns it.
    slots: of the tokens that it names, by the group of layers whose block table has them, as select_slots or pool_slots
    returns them.
    """

    queries: slice
    lengths: torch.Tensor
    rows: torch.Tensor
    tokens: int
    firsts: torch.Tensor | None
    groups: DecodeParts
    parts: DecodeParts
    numbers: torch.Tensor | None
    slots: dict[int, torch.Tensor]


class TritonIndexed(TritonLatent):
    """Chunks whose sequences are so short that all tokens are selected are computed as in TritonLatent. All other
    tokens are absorbed, and each has a list of slots in place of a block table."""

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        super().__init__(cache, num_heads, specs, limits)
        assert isinstance(self._spec, IndexedLatentSpec)
        self._indexed = self._spec
        self._scored = 1 if limits.deterministic else _TOKENS
        self._selected: list[_Selected] = []
        # A CUDA graph must not be the first to need these numbers, since its capture would leave them undefined.
        self._rows_in_order(max(limits.sequences, _MOST_QUERIES))

    def prepare(self, batch: AttentionBatch) -> None:
        self._selected = []
        super().prepare(batch)
        longer = [
            index for index in range(batch.decodes, len(batch.lengths)) if not self._reads_all(batch.lengths[index])
        ]
        calls = [
            (index, first, min(first + _MOST_QUERIES, batch.starts[index + 1]))
            for index in longer
            for first in range(batch.starts[index], batch.starts[index + 1], _MOST_QUERIES)
        ]
        arrays = [array for call in calls for array in group_queries(batch, *call, self._scored)]
        uploaded = iter(pack_to_device(arrays, self._cache.device) if arrays else [])
        for _, first, end in calls:
            lengths, rows, group_lengths, firsts, group_rows = itertools.islice(uploaded, 5)
            queries = slice(first, end)
            self._add_call(queries, lengths, rows.long(), self._scored, firsts, group_lengths, group_rows.long())

    def use_rows(self, tables: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self._selected = []
        super().use_rows(tables, rows, lengths)

    def _reads_all(self, length: int) -> bool:
        return self._indexed.attended(length) == length

    def _absorb_decodes(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        if self._reads_all(self._limits.keys):
            super()._absorb_decodes(rows, lengths)
            return
        self._add_call(slice(0, len(rows)), lengths, rows, 1, None, lengths, rows)

    def _add_call(
        self, queries: slice, lengths: torch.Tensor, rows: torch.Tensor, tokens: int, firsts: torch.Tensor | None,
        group_lengths: torch.Tensor, group_rows: torch.Tensor,
    ) -> None:  # fmt: skip
        own, size = self._rows_in_order(len(rows)), self._indexed.group
        ended = lengths // size * size
        attended = ended.clamp(max=self._indexed.selected) + (lengths - ended)
        parts = plan_parts(attended.int(), own, self._capacity, self._none)
        groups = plan_parts((group_lengths // size).int(), group_rows, self._capacity, self._none)
        self._selected.append(_Selected(queries, lengths, rows, tokens, firsts, groups, parts, None, {}))

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None) -> None:
        assert weights is not None
        spec, group = self._indexed, self._cache.group_of(layer)
        tables = self._tables[group]
        index_keys = self._cache.layer(layer)[1][..., : spec.index_dim]
        size, page = spec.group, index_keys.shape[1]
        width = self._limits.keys // size
        for call in self._selected:
            scores = index_scores(
                queries[call.queries], weights[call.queries], index_keys, tables, call.groups, width, call.tokens,
                call.firsts, size,
            )  # fmt: skip
            if size == 1 and self._cache.num_groups == 1:
                call.slots = {group: select_slots(scores, call.lengths, call.rows, tables, page, spec.selected)}
            else:
                ended = (call.lengths // size).int()
                call.numbers, call.slots = select_numbers(scores[:, None], ended, 1, spec.selected // size), {}

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().attend(layer, q, out, sinks, up)
        assert up is not None
        # Each token is a block of its own, so that the slots are the numbers of blocks.
        spec, fixed, latents = self._spec, self._limits.deterministic, self._cache.layer(layer)[0]
        tokens = latents.view(-1, 1, 1, latents.shape[3])
        for call in self._selected:
            slots = self._slots(call, self._cache.group_of(layer), latents.shape[1])
            absorbed = absorb_queries(q[call.queries], up, spec.rope_dim, fixed)
            attended = latent_decode(absorbed, tokens, slots, call.parts, spec.scale, spec.rank, 1, None, sinks, 0)
            values_of(attended, up, out[call.queries], fixed)

    def _slots(self, call: _Selected, group: int, page: int) -> torch.Tensor:
        """Return the slots of selected tokens by the block table of a group of layers. page: tokens of a block."""
        if group not in call.slots:
            # Layers of one group share these.
            assert call.numbers is not None
            tables, size = self._tables[group], self._indexed.group
            call.slots[group] = pool_slots(call.numbers, call.lengths, call.rows, tables, page, size)
        return call.slots[group]
