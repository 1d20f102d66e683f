"""Latent attention through our Triton kernels, which read the paged cache in place or expand it in parts."""

import itertools

import msgspec
import numpy as np
import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.kv_cache import KvCache
from baton_engine.latent_spec import shared_spec
from baton_engine.transfer import pack_to_device
from baton_kernels.decode_parts import DecodeParts, plan_parts
from baton_kernels.head_products import absorb_queries, values_of
from baton_kernels.latent_decode import latent_decode, programs_per_part, tokens_per_group
from baton_kernels.latent_prefill import gather_latents, gather_tiles, latent_prefill, queries_per_tile
from baton_kernels.prefill_attention import prefill_tiles

from .backend import AttentionBatch, StepLimits

# The number of programs of the decode kernel that fills a device: two on each multiprocessor of an H200.
_PROGRAMS = 256
# Bounds the expanded keys and values of a call, which are computed for some heads at a time.
_EXPANDED_BYTES = 256 << 20


class _Absorbed(msgspec.Struct):
    """Queries that attend over latents in one call.

    queries: rows of the step's tokens. tokens: the most queries of a group. firsts: [groups + 1] int32, None = each
    group has one query.
    """

    queries: slice
    tokens: int
    firsts: torch.Tensor | None
    parts: DecodeParts


class _Expanded(msgspec.Struct):
    """Sequences whose latents are expanded in one call.

    keys: rows of all of them. gather: of `gather_tiles`. key_starts: [sequences of the step], the row that the first
    key has or would have, of those that the call expands. tiles: of queries, as latent_prefill has them.
    """

    keys: int
    gather: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    key_starts: torch.Tensor
    tiles: tuple[torch.Tensor, torch.Tensor]


class TritonLatent:
    """Single new tokens are absorbed. Longer chunks are absorbed or expanded, whichever is cheaper.

    With `deterministic` each token is absorbed in a call of the same tiles, and its keys are added up in one part.
    """

    name = "triton"

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        self._cache, self._heads, self._limits = cache, num_heads, limits
        self._spec = shared_spec(specs)
        size = cache.planes[0].element_size()
        self._queries = queries_per_tile(size)
        self._group = 1 if limits.deterministic else tokens_per_group(num_heads, size, self._spec.rank)
        # With a capacity of one part, no sequence is divided.
        programs = max(_PROGRAMS // programs_per_part(num_heads, size, self._spec.rank), 1)
        self._capacity = 1 if limits.deterministic else programs
        self._none = torch.empty(0, dtype=torch.int32, device=cache.device)
        self._in_order = torch.empty(0, dtype=torch.int64, device=cache.device)
        self._tables: tuple[torch.Tensor, ...] = ()
        self._absorbed: list[_Absorbed] = []
        self._expanded: list[_Expanded] = []

    def prepare(self, batch: AttentionBatch) -> None:
        counts, decodes = batch.counts, batch.decodes
        chunks = [index for index in range(decodes, len(counts)) if self._reads_all(batch.lengths[index])]
        grouped = [index for index in chunks if not self._expands(counts[index], batch.lengths[index])]
        calls = self._calls([index for index in chunks if index not in grouped], counts, batch.lengths)
        expansions = [self._expansion(batch, call) for call in calls]
        parts: list[np.ndarray | list[int]] = [batch.tables.ravel(), batch.lengths, batch.starts]
        for index in grouped:
            parts += self._groups(batch, index)
        for _, columns in expansions:
            parts += columns
        uploaded = iter(pack_to_device(parts, self._cache.device))
        flat, self._lengths, self._starts = itertools.islice(uploaded, 3)
        self._tables = flat.view(batch.tables.shape).unbind(1)
        self._absorbed, self._expanded = [], []
        if decodes:
            self._absorb_decodes(self._rows_in_order(decodes), self._lengths[:decodes])
        for index in grouped:
            lengths, firsts, rows = itertools.islice(uploaded, 3)
            plan = plan_parts(lengths, rows.long(), self._capacity, self._none)
            queries = slice(batch.starts[index], batch.starts[index + 1])
            self._absorbed.append(_Absorbed(queries, self._group, firsts, plan))
        for keys, _ in expansions:
            sequences, positions, to, key_starts, *tiles = itertools.islice(uploaded, 6)
            self._expanded.append(_Expanded(keys, (sequences, positions, to), key_starts, (tiles[0], tiles[1])))

    def use_rows(self, tables: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self._tables, self._absorbed, self._expanded = tables.unbind(1), [], []
        self._absorb_decodes(rows, lengths)

    def _absorb_decodes(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        parts = plan_parts(lengths, rows, self._capacity, self._none)
        self._absorbed.append(_Absorbed(slice(0, len(rows)), 1, None, parts))

    def _reads_all(self, length: int) -> bool:
        """Whether the last query of a sequence of so many tokens attends to all of them."""
        return True

    def _expands(self, tokens: int, length: int) -> bool:
        return not self._limits.deterministic and self._spec.expands(tokens, length)

    def _rows_in_order(self, count: int) -> torch.Tensor:
        if len(self._in_order) < count:
            self._in_order = torch.arange(max(count, 1024), device=self._cache.device)
        return self._in_order[:count]

    def _calls(self, sequences: list[int], counts: list[int], lengths: list[int]) -> list[list[int]]:
        """Divide sequences into calls, each with at most as many keys as the longest sequence can have."""
        calls: list[list[int]] = []
        keys = 0
        for index in sequences:
            seen = lengths[index] - self._oldest(counts[index], lengths[index])
            if not calls or keys + seen > self._limits.keys:
                calls.append([])
                keys = 0
            calls[-1].append(index)
            keys += seen
        return calls

    def _groups(self, batch: AttentionBatch, index: int) -> list[list[int]]:
        """Return lengths, first queries and rows of tables of the groups of a chunk, whose queries count from 0."""
        count, length = batch.starts[index + 1] - batch.starts[index], batch.lengths[index]
        firsts = [*range(0, count, self._group), count]
        return [[length - count + end for end in firsts[1:]], firsts, [index] * (len(firsts) - 1)]

    def _oldest(self, count: int, length: int) -> int:
        """Return the first token that any of a sequence's `count` last tokens sees."""
        return 0 if self._spec.window is None else max(length - count + 1 - self._spec.window, 0)

    def _expansion(self, batch: AttentionBatch, call: list[int]) -> tuple[int, list[list[int]]]:
        """Return the rows of keys of a call, and what its kernels need on the device."""
        oldest = list(map(self._oldest, batch.counts, batch.lengths))
        gather, rows, keys = gather_tiles(call, batch.lengths, oldest)
        key_starts = [0] * len(batch.lengths)
        for index, row in zip(call, rows, strict=True):
            key_starts[index] = row
        return keys, [*gather, key_starts, *prefill_tiles(batch.starts, self._queries, call)]

    def outputs(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], self._spec.value_dim)

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert up is not None
        latents = self._cache.layer(layer)[0]
        tables, spec, fixed = self._tables[self._cache.group_of(layer)], self._spec, self._limits.deterministic
        for call in self._absorbed:
            absorbed = absorb_queries(q[call.queries], up, spec.rope_dim, fixed)
            attended = latent_decode(
                absorbed, latents, tables, call.parts, spec.scale, spec.rank, call.tokens, call.firsts, sinks,
                spec.window or 0,
            )  # fmt: skip
            values_of(attended, up, out[call.queries], fixed)
        for expansion in self._expanded:
            gathered = gather_latents(latents, tables, self._lengths, expansion.gather, expansion.keys)
            self._attend_expanded(q, gathered, up, expansion, sinks, out)

    def _attend_expanded(
        self, q: torch.Tensor, latents: torch.Tensor, up: torch.Tensor, call: _Expanded, sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        spec, (heads, outputs, rank) = self._spec, up.shape
        most = _EXPANDED_BYTES // (call.keys * outputs * up.element_size())
        rounds = -(-heads // min(max(most, 1), heads))
        each = -(-heads // rounds)
        expanded = latents.new_empty(call.keys * each * outputs)
        for first in range(0, heads, each):
            count = min(each, heads - first)
            there = expanded[: call.keys * count * outputs].view(call.keys, count * outputs)
            torch.mm(latents[:, :rank], up[first : first + count].view(-1, rank).t(), out=there)
            latent_prefill(
                q, there.view(call.keys, count, outputs), latents, self._lengths, self._starts, call.key_starts,
                call.tiles, spec.scale, rank, first, out, self._queries, sinks, spec.window or 0,
            )  # fmt: skip
