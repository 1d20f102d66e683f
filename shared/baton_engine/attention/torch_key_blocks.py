"""Attention over selected blocks of keys through torch's scaled_dot_product_attention."""

import torch

from baton_engine.attention_spec import AttentionSpec, KeyBlockSpec
from baton_engine.kv_cache import KvCache
from baton_kernels.reference.key_blocks import key_block_scores_reference, key_block_selection_reference

from .backend import AttentionBatch, StepLimits
from .torch_sdpa import TorchSdpa


class TorchKeyBlocks(TorchSdpa):
    """Keys of blocks that are not selected are masked. Layers with a plain AttentionSpec attend to all keys."""

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        super().__init__(cache, num_heads, specs, limits)
        self._selected: list[torch.Tensor | None] = []

    def prepare(self, batch: AttentionBatch) -> None:
        super().prepare(batch)
        self._selected = [None] * len(self._calls)

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None) -> None:
        spec, group = self._specs[layer], self._cache.group_of(layer)
        assert isinstance(spec, KeyBlockSpec)
        # The key-value heads have copies of one index key.
        index_keys = self._cache.layer(layer)[2][:, :, 0]
        for index, call in enumerate(self._calls):
            if call.length <= spec.selected:
                continue
            read = call.keys[spec.reach]
            # A token that no query sees may hold anything, also NaN.
            keys = index_keys.index_select(0, read.blocks[group]).flatten(0, 1).index_fill_(0, read.unseen, 0.0)
            keys = keys.view(call.sequences, -1, keys.shape[1])
            q = queries[call.rows].view(call.sequences, call.queries, *queries.shape[1:])
            seen = super()._mask_of(index, spec)
            if seen is None:
                seen = torch.ones(q.shape[1], keys.shape[1], dtype=torch.bool, device=q.device).tril_()
            seen = seen.view(-1, q.shape[1], keys.shape[1]).expand(call.sequences, -1, -1)
            scores = key_block_scores_reference(q, keys, seen, spec.block_keys, spec.local_blocks)
            selected = key_block_selection_reference(scores, seen, spec.block_keys, spec.selected_blocks)
            # The shapes of scores in _attend_decodes and _attend_chunk: [sequences, kv_heads, 1, keys], and
            # [kv_heads, 1, queries, keys].
            self._selected[index] = selected.transpose(1, 2) if call.queries == 1 else selected.permute(2, 0, 1, 3)

    def _mask_of(self, call: int, spec: AttentionSpec) -> torch.Tensor | None:
        selected = self._selected[call] if isinstance(spec, KeyBlockSpec) else None
        return super()._mask_of(call, spec) if selected is None else selected
