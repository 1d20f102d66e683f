"""Compressed attention in plain torch, for CPU and for devices without a faster backend."""

import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.compressed_spec import CompressedSpec, Entries
from baton_engine.kv_cache import KvCache
from baton_kernels.reference.indexed import index_scores_reference, selection_reference

from .backend import AttentionBatch, StepLimits
from .torch_sdpa import TorchSdpa, attention

_ALL = (0, False)  # the reach of queries that see all tokens


class TorchCompressed(TorchSdpa):
    """Entries are further keys of the same call. Those that a query does not attend to are masked."""

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        self._compressed = {layer: spec for layer, spec in enumerate(specs) if isinstance(spec, CompressedSpec)}
        [self._near] = {
            AttentionSpec(scale=spec.scale, window=spec.window, sinks=True) for spec in self._compressed.values()
        }
        super().__init__(cache, num_heads, (self._near, AttentionSpec(scale=self._near.scale)), limits)
        self._positions: list[torch.Tensor] = []
        self._selected: list[torch.Tensor | None] = []

    def prepare(self, batch: AttentionBatch) -> None:
        super().prepare(batch)
        ends, counts = torch.tensor(batch.lengths), batch.counts
        self._selected = [None] * len(self._calls)
        self._positions = []
        for call in self._calls:
            first = batch.starts.index(call.rows.start)
            last = ends[first : first + call.sequences, None]
            self._positions.append((last - counts[first] + torch.arange(counts[first])).to(self._cache.device))

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None) -> None:
        assert weights is not None
        entries = self._compressed[layer].entries
        assert entries is not None
        column, dim = entries.index_column, entries.index_dim
        for index, call in enumerate(self._calls):
            rows, visible = self._rows(index, entries, entries.rate - 1)
            if rows.shape[1] <= entries.selected:
                continue
            q, of_heads = (torch.unflatten(x[call.rows], 0, (call.sequences, -1)) for x in (queries, weights))
            scores = index_scores_reference(q, of_heads, rows[..., column : column + dim])
            self._selected[index] = selection_reference(scores, visible, entries.selected)

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert sinks is not None
        keys, group, entries = self._cache.layer(layer)[0], self._cache.group_of(layer), self._compressed[layer].entries
        for index, call in enumerate(self._calls):
            read, mask = call.keys[self._near.reach], call.masks[self._near]
            # A key that no query sees may hold anything, and 0 times NaN is NaN: it is 0 here.
            near = keys.index_select(0, read.blocks[group]).flatten(0, 2).index_fill_(0, read.unseen, 0.0)
            seen = torch.unflatten(near, 0, (call.sequences, -1))
            if mask is None:
                seen = seen[:, : call.queries]
                mask = torch.ones(1, 1, call.queries, call.queries, dtype=torch.bool, device=q.device).tril_()
            if entries is not None:
                rows, visible = self._rows(index, entries, entries.first_row)
                seen = torch.cat([seen, rows], dim=1)
                chosen = visible if self._selected[index] is None else self._selected[index]
                assert chosen is not None
                mask = torch.cat([mask.expand(call.sequences, 1, call.queries, -1), chosen[:, None]], dim=3)
            heads = torch.unflatten(q[call.rows], 0, (call.sequences, -1)).transpose(1, 2)
            result = attention(heads, seen[:, None], seen[:, None], mask, self._near, sinks.view(1, -1, 1, 1))
            out[call.rows].copy_(result.transpose(1, 2).flatten(0, 1))
        self._selected = [None] * len(self._calls)

    def _rows(self, index: int, entries: Entries, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one row of each window that has ended in a call's sequences, [sequences, windows, elements], and which
        of them the queries see, [sequences, queries, windows]. row: that of this token of a window."""
        call, plane = self._calls[index], self._cache.layer(entries.layer)[0]
        blocks = call.keys[_ALL].blocks[self._cache.group_of(entries.layer)]
        every = torch.unflatten(plane.index_select(0, blocks).flatten(0, 2), 0, (call.sequences, -1))
        windows = call.length // entries.rate
        ended = (self._positions[index][..., None] + 1) // entries.rate
        visible = torch.arange(windows, device=every.device) < ended
        rows = every[:, row :: entries.rate][:, :windows]
        # A row that no query sees may hold anything.
        return rows.masked_fill(~visible.any(dim=1)[..., None], 0.0), visible
