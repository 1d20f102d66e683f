"""Attention through torch's scaled_dot_product_attention, for CPU and for devices on which no faster backend runs."""

import msgspec
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from baton_engine.attention_spec import AttentionSpec
from baton_engine.kv_cache import KvCache
from baton_kernels.reference.kv_codes import kv_numbers_reference
from baton_kernels.reference.paged_attention import oldest_key, rounded_alibi_reference

from .backend import AttentionBatch, StepLimits

# Bounds the memory of a call: 512 MiB of keys and values with 8 heads of 128 in float32.
_MOST_KEYS = 1 << 16


class _Keys(msgspec.Struct):
    """The keys that queries of one window read.

    blocks: [groups of layers, sequences * blocks each] int64. positions: [sequences, keys] int64, of the keys in those
    blocks. unseen: the keys that no query sees, counted over all sequences.
    """

    blocks: torch.Tensor
    positions: torch.Tensor
    unseen: torch.Tensor


class _Call(msgspec.Struct):
    """Sequences that go into one call: decodes together, each prefill chunk alone.

    rows: of the step's tokens. queries: tokens per sequence. length: tokens of the longest sequence. keys: by
    `reach` of a spec. masks: None = plain causal from the first token.
    """

    rows: slice
    sequences: int
    queries: int
    length: int
    keys: dict[tuple[int, bool], _Keys]
    masks: dict[AttentionSpec, torch.Tensor | None]


class TorchSdpa:
    """Gathers each sequence's blocks and calls SDPA, with the query heads of a KV head as one group."""

    name = "torch_sdpa"

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        self._cache = cache
        self._block_size, self._kv_heads = cache.planes[0].shape[2:4]
        self._value_dims = cache.layout.value_dims
        self._specs = specs
        self._slopes = {spec: self._slopes_of(spec.alibi) for spec in set(specs) if spec.alibi is not None}
        self._reaches = {spec.reach for spec in specs}
        self._calls: list[_Call] = []

    def prepare(self, batch: AttentionBatch) -> None:
        decodes = batch.decodes
        self._calls = [self._decode_call(batch, rows) for rows in _parts(batch.lengths[:decodes], self._block_size)]
        self._calls += [self._chunk_call(batch, index) for index in range(decodes, len(batch.lengths))]

    def _decode_call(self, batch: AttentionBatch, rows: slice) -> _Call:
        lengths = np.array(batch.lengths[rows])
        keys = self._all_keys(batch.tables[rows], lengths, lengths - 1)
        queries = torch.from_numpy(lengths - 1).to(self._cache.device)[:, None]
        masks: dict[AttentionSpec, torch.Tensor | None] = {}
        for spec in set(self._specs):
            positions = keys[spec.reach].positions
            seen, distance = _is_seen(queries, positions, spec), queries - positions
            masks[spec] = self._mask(spec, seen[:, None, None, :], distance[:, None, None, :], positions)
        return _Call(rows, len(lengths), 1, int(lengths.max()), keys, masks)

    def _chunk_call(self, batch: AttentionBatch, index: int) -> _Call:
        start, end, length = batch.starts[index], batch.starts[index + 1], batch.lengths[index]
        first = length - (end - start)
        keys = self._all_keys(batch.tables[index : index + 1], np.array([length]), np.array([first]))
        queries = torch.arange(first, length, device=self._cache.device)[:, None]
        masks: dict[AttentionSpec, torch.Tensor | None] = {}
        for spec in set(self._specs):
            if first == 0 and length > 1 and (spec.window is None or spec.window >= length) and spec.alibi is None:
                masks[spec] = None
                continue
            positions = keys[spec.reach].positions
            seen, distance = _is_seen(queries, positions, spec), queries - positions
            masks[spec] = self._mask(spec, seen[None, None], distance[None, None], positions)
        return _Call(slice(start, end), 1, end - start, length, keys, masks)

    def _all_keys(self, tables: np.ndarray, lengths: np.ndarray, firsts: np.ndarray) -> dict[tuple[int, bool], _Keys]:
        """Return the keys of some sequences for each `reach`.

        tables: [sequences, groups of layers, most blocks]. lengths: [sequences]. firsts: [sequences], the positions of
        their first queries.
        """
        size, device, found = self._block_size, self._cache.device, {}
        for window, chunked in self._reaches:
            oldest = np.maximum(oldest_key(firsts, window, chunked), 0) if window else np.zeros_like(firsts)
            begins = oldest // size
            blocks = np.arange(max(-(-lengths // size) - begins))
            # What lies beyond the end of a table is not seen.
            index = np.minimum(begins[:, None] + blocks, tables.shape[2] - 1)
            chosen = np.take_along_axis(tables, index[:, None, :], axis=2).astype(np.int64)
            positions = begins[:, None] * size + np.arange(len(blocks) * size)
            unseen = (positions >= lengths[:, None]) | (positions < oldest[:, None])
            found[window, chunked] = _Keys(
                torch.from_numpy(chosen).to(device).transpose(0, 1).flatten(1),
                torch.from_numpy(positions).to(device),
                torch.from_numpy(np.flatnonzero(unseen)).to(device),
            )
        return found

    def _slopes_of(self, alibi: tuple[float, ...]) -> torch.Tensor:
        """Return [1, kv_heads, query heads of each, 1]."""
        slopes = torch.tensor(alibi, dtype=torch.float32, device=self._cache.device)
        return slopes.view(1, self._kv_heads, -1, 1)

    def _mask(
        self, spec: AttentionSpec, seen: torch.Tensor, distance: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return SDPA's attn_mask. seen: whether a query sees a key, distance: tokens between them, [sequences, 1,
        queries, keys] each. positions: of keys, [sequences, keys]."""
        if spec.alibi is None:
            return seen
        slopes = self._slopes[spec]
        if distance.shape[2] > 1:
            # The shape of scores in _attend_chunk: [kv_heads, query heads of each, queries, keys].
            slopes = slopes.view(self._kv_heads, -1, 1, 1)
        if spec.rounded_alibi:
            bias = spec.scale * rounded_alibi_reference(slopes, positions[:, None, None, :])
            return bias.masked_fill(~seen, float("-inf")).to(self._cache.dtype)
        return (-slopes * distance).masked_fill_(~seen, float("-inf")).to(self._cache.dtype)

    def outputs(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], self._value_dims[q.shape[2]])

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        keys, values = self._cache.layer(layer)[:2]
        spec, group = self._specs[layer], self._cache.group_of(layer)
        sinks = None if sinks is None else sinks.view(keys.shape[2], -1, 1)
        for index, call in enumerate(self._calls):
            read = call.keys[spec.reach]
            # [keys, kv_heads, elements of a head]. A key that no query sees may hold anything, and 0 times NaN is NaN:
            # it is 0 here.
            k, v = (
                each.index_fill_(0, read.unseen, 0.0)
                for each in self._numbers(layer, (keys, values), read.blocks[group])
            )
            rows, mask = call.rows, self._mask_of(index, spec)
            if call.queries == 1:
                self._attend_decodes(q[rows], k, v, call.sequences, mask, spec, sinks, out[rows])
            else:
                self._attend_chunk(q[rows], k, v, mask, spec, sinks, out[rows])

    def _mask_of(self, call: int, spec: AttentionSpec) -> torch.Tensor | None:
        """Return which keys the queries of a call see, as _Call.masks has it."""
        return self._calls[call].masks[spec]

    def _numbers(self, layer: int, planes: tuple[torch.Tensor, ...], blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what some blocks of a layer's planes hold, [keys, kv_heads, elements of a head] each."""
        scales = self._cache.scales
        if scales is None:
            return tuple(plane.index_select(0, blocks).flatten(0, 1) for plane in planes)
        # As bytes, since torch does not copy every dtype of 8 bits by index.
        codes = (plane.view(torch.uint8).index_select(0, blocks).flatten(0, 1).view(plane.dtype) for plane in planes)
        each = zip(codes, scales[layer], strict=True)
        return tuple(kv_numbers_reference(code, scale, self._cache.dtype) for code, scale in each)

    def _attend_decodes(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sequences: int,
        mask: torch.Tensor | None,
        spec: AttentionSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        # [sequences, kv_heads, keys, elements of a head] against the group of query heads as rows.
        kv_heads, head_dim = k.shape[1:]
        k, v = (torch.unflatten(x, 0, (sequences, -1)).transpose(1, 2) for x in (k, v))
        grouped = q.reshape(sequences, kv_heads, -1, head_dim)
        out.view(*grouped.shape[:3], -1).copy_(attention(grouped, k, v, mask, spec, sinks))

    def _attend_chunk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        spec: AttentionSpec,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        # The KV heads are the batch dimension and the query heads of each the head dimension, so that keys are
        # broadcast and not copied.
        kv_heads, head_dim = k.shape[1:]
        grouped = q.view(q.shape[0], kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        if mask is None:
            k, v = k[: len(q)], v[: len(q)]
        shape = (kv_heads, grouped.shape[1], -1, -1)
        k = k.transpose(0, 1).unsqueeze(1).expand(shape)
        v = v.transpose(0, 1).unsqueeze(1).expand(shape)
        # The shape of scores is [kv_heads, query heads of each, queries, keys].
        result = attention(grouped, k, v, mask, spec, None if sinks is None else sinks.unsqueeze(-1))
        torch.unflatten(out, 1, (kv_heads, -1)).copy_(result.permute(2, 0, 1, 3))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute scaled_dot_product_attention, but with a softcap and sinks, which torch lacks.

    mask: None = causal. sinks: of the shape of scores, but for 1 in the dimension of keys.
    """
    if not spec.softcap and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scale)
    scores = (q.float() @ k.float().transpose(-2, -1)).mul_(spec.scale)
    if spec.softcap:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(dim=-1)[..., : k.shape[-2]].to(v.dtype) @ v


def _is_seen(queries: torch.Tensor, keys: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """queries, keys: positions, of shapes that broadcast."""
    seen, (window, chunked) = keys <= queries, spec.reach
    return seen & (keys >= oldest_key(queries, window, chunked)) if window else seen


def _parts(lengths: list[int], block_size: int) -> list[slice]:
    """Return the slices of sequences that attend in one call. A call gathers at most _MOST_KEYS keys, if it has several
    sequences: as many for each as for its longest one."""
    parts: list[slice] = []
    first = longest = 0
    for row, length in enumerate(lengths):
        blocks = -(-length // block_size)
        longest = max(longest, blocks)
        if row > first and (row + 1 - first) * longest * block_size > _MOST_KEYS:
            parts.append(slice(first, row))
            first, longest = row, blocks
    return [*parts, slice(first, len(lengths))] if lengths else []
