"""Attention through torch's scaled_dot_product_attention: for CPU, and wherever nothing faster runs."""

import msgspec
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from baton_engine.attention_spec import AttentionSpec
from baton_engine.kv_cache import KvCache

from .backend import AttentionBatch

# Bounds the memory of a call: 512 MiB of keys and values with 8 heads of 128 in float32.
_MOST_KEYS = 1 << 16


class _Group(msgspec.Struct):
    """Sequences that go into one call: decodes together, each prefill chunk alone."""

    rows: slice  # of the step's tokens
    sequences: int
    blocks: torch.Tensor  # [sequences * blocks each] int64
    queries: int  # tokens per sequence
    unseen: torch.Tensor  # slots of the gathered blocks that no query sees
    masks: dict[AttentionSpec, torch.Tensor | None]  # None = plain causal from the first token


class TorchSdpa:
    """Gathers each sequence's blocks and calls SDPA, with the query heads of a KV head as one group."""

    name = "torch_sdpa"

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...]) -> None:
        """specs: of each layer."""
        self._cache = cache
        self._block_size, self._kv_heads, self._head_dim = cache.planes[0].shape[2:]
        self._group_size = num_heads // self._kv_heads
        self._specs = specs
        self._slopes = {spec: self._slopes_of(spec.alibi) for spec in set(specs) if spec.alibi is not None}
        self._groups: list[_Group] = []

    def prepare(self, batch: AttentionBatch) -> None:
        counts = [end - start for start, end in zip(batch.starts, batch.starts[1:], strict=False)]
        decodes = next((index for index, count in enumerate(counts) if count > 1), len(counts))
        self._groups = [self._decode_group(batch, rows) for rows in _parts(batch.lengths[:decodes], self._block_size)]
        self._groups += [self._chunk_group(batch, index) for index in range(decodes, len(counts))]

    def _decode_group(self, batch: AttentionBatch, rows: slice) -> _Group:
        longest = max(-(-length // self._block_size) for length in batch.lengths[rows])
        device = self._cache.device
        tables = _blocks(batch.tables[rows, :longest], device)
        lengths = torch.tensor(batch.lengths[rows], device=device).unsqueeze(1)
        keys = torch.arange(longest * self._block_size, device=device).unsqueeze(0)
        masks: dict[AttentionSpec, torch.Tensor | None] = {}
        for spec in set(self._specs):
            seen = keys < lengths
            if spec.window is not None:
                seen &= keys >= lengths - spec.window
            masks[spec] = self._mask(spec, seen[:, None, None, :], (lengths - 1 - keys)[:, None, None, :])
        unseen = (keys >= lengths).flatten().nonzero().squeeze(1)
        return _Group(rows, len(tables), tables.flatten(), 1, unseen, masks)

    def _chunk_group(self, batch: AttentionBatch, index: int) -> _Group:
        start, end, length = batch.starts[index], batch.starts[index + 1], batch.lengths[index]
        device = self._cache.device
        table = _blocks(batch.tables[index, : -(-length // self._block_size)], device)
        queries = torch.arange(length - (end - start), length, device=device).unsqueeze(1)
        keys = torch.arange(len(table) * self._block_size, device=device).unsqueeze(0)
        masks: dict[AttentionSpec, torch.Tensor | None] = {}
        for spec in set(self._specs):
            window = spec.window
            if end - start == length > 1 and (window is None or window >= length) and spec.alibi is None:
                masks[spec] = None
                continue
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            masks[spec] = self._mask(spec, seen[None, None], (queries - keys)[None, None])
        unseen = torch.arange(length, len(table) * self._block_size, device=device)
        return _Group(slice(start, end), 1, table, end - start, unseen, masks)

    def _slopes_of(self, alibi: tuple[float, ...]) -> torch.Tensor:
        """Return [1, kv_heads, query heads of each, 1]."""
        slopes = torch.tensor(alibi, dtype=torch.float32, device=self._cache.device)
        return slopes.view(1, self._kv_heads, self._group_size, 1)

    def _mask(self, spec: AttentionSpec, seen: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Return what SDPA calls attn_mask. seen, distance: of queries from keys, [sequences, 1, queries, keys]."""
        if spec.alibi is None:
            return seen
        slopes = self._slopes[spec]
        if distance.shape[2] > 1:
            # [kv_heads, query heads of each, queries, keys], as _attend_chunk has its scores.
            slopes = slopes.view(self._kv_heads, self._group_size, 1, 1)
        return (-slopes * distance).masked_fill_(~seen, float("-inf")).to(self._cache.planes[0].dtype)

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = self._cache.layer(layer)
        spec = self._specs[layer]
        for group in self._groups:
            rows, mask = group.rows, group.masks[spec]
            if group.queries == 1:
                self._attend_decodes(q[rows], keys, values, group, mask, spec, out[rows])
            else:
                k, v = self._gather(keys, group), self._gather(values, group)
                self._attend_chunk(q[rows], k, v, mask, spec, out[rows])

    def _gather(self, cache: torch.Tensor, group: _Group) -> torch.Tensor:
        """Return a group's keys or values, [slots, kv_heads, head_dim].

        A slot that no query sees may hold anything, and 0 times NaN is NaN: it is 0 here.
        """
        return cache.index_select(0, group.blocks).flatten(0, 1).index_fill_(0, group.unseen, 0.0)

    def _attend_decodes(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: _Group,
        mask: torch.Tensor | None,
        spec: AttentionSpec,
        out: torch.Tensor,
    ) -> None:
        # [sequences, kv_heads, keys, head_dim] against the group of query heads as rows.
        shape = (group.sequences, -1, self._kv_heads, self._head_dim)
        k, v = (self._gather(x, group).view(shape).transpose(1, 2) for x in (keys, values))
        grouped = q.reshape(group.sequences, self._kv_heads, self._group_size, self._head_dim)
        out.view(grouped.shape).copy_(_attention(grouped, k, v, mask, spec))

    def _attend_chunk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        spec: AttentionSpec,
        out: torch.Tensor,
    ) -> None:
        # KV heads are the batch and the query heads of each its heads, so that keys are broadcast, never repeated.
        grouped = q.view(q.shape[0], self._kv_heads, self._group_size, self._head_dim).permute(1, 2, 0, 3)
        if mask is None:
            k, v = k[: len(q)], v[: len(q)]
        shape = (self._kv_heads, self._group_size, -1, -1)
        k = k.transpose(0, 1).unsqueeze(1).expand(shape)
        v = v.transpose(0, 1).unsqueeze(1).expand(shape)
        result = _attention(grouped, k, v, mask, spec)
        out.view(-1, self._kv_heads, self._group_size, self._head_dim).copy_(result.permute(2, 0, 1, 3))


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec
) -> torch.Tensor:
    """As scaled_dot_product_attention, which has no softcap. mask: None = causal."""
    if not spec.softcap:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scale)
    scores = (q.float() @ k.float().transpose(-2, -1)).mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1).to(v.dtype) @ v


def _blocks(tables: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return blocks in order to index with them."""
    return torch.from_numpy(tables.astype(np.int64)).to(device)


def _parts(lengths: list[int], block_size: int) -> list[slice]:
    """Return which neighbours attend together, so that few keys are gathered at once: each takes as many as the
    longest."""
    parts: list[slice] = []
    first = longest = 0
    for row, length in enumerate(lengths):
        blocks = -(-length // block_size)
        longest = max(longest, blocks)
        if row > first and (row + 1 - first) * longest * block_size > _MOST_KEYS:
            parts.append(slice(first, row))
            first, longest = row, blocks
    return [*parts, slice(first, len(lengths))] if lengths else []
