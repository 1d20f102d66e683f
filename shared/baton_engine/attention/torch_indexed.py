"""Latent attention over selected tokens through torch's scaled_dot_product_attention."""

import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.kv_cache import KvCache
from baton_engine.latent_spec import IndexedLatentSpec
from baton_kernels.reference.indexed import index_scores_reference, selection_reference

from .backend import AttentionBatch, StepLimits
from .torch_latent import TorchLatent


class TorchIndexed(TorchLatent):
    """Tokens that are not selected are masked."""

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        super().__init__(cache, num_heads, specs, limits)
        self._selected: list[torch.Tensor | None] = []

    def prepare(self, batch: AttentionBatch) -> None:
        super().prepare(batch)
        self._selected = [None] * len(self._calls)

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None) -> None:
        assert weights is not None
        spec, index_keys, group = self._spec, self._cache.layer(layer)[1], self._cache.group_of(layer)
        assert isinstance(spec, IndexedLatentSpec)
        for index, call in enumerate(self._calls):
            if spec.attended(call.length) == call.length:
                continue
            read = call.keys[spec.reach]
            # A token that no query sees may hold anything, also NaN.
            rows = index_keys.index_select(0, read.blocks[group]).flatten(0, 2).index_fill_(0, read.unseen, 0.0)
            # The key of a group is in the row of its last token.
            keys = rows.view(call.sequences, -1, spec.index_row)[:, spec.group - 1 :: spec.group, : spec.index_dim]
            shape = call.sequences, call.queries, -1
            q, of_heads = (x[call.rows].view(*shape[:2], *x.shape[1:]) for x in (queries, weights))
            scores = index_scores_reference(q, of_heads, keys)
            mask = super()._mask_of(index, spec)
            if mask is None:
                every = call.queries, len(rows) // call.sequences
                mask = torch.ones(every, dtype=torch.bool, device=scores.device).tril_()
            seen = mask.view(shape).expand(call.sequences, -1, -1)
            ended = seen[..., spec.group - 1 :: spec.group]
            chosen = selection_reference(scores, ended, spec.selected // spec.group)
            selected = seen & ~(ended & ~chosen).repeat_interleave(spec.group, dim=-1)
            # As _Call.masks has it.
            self._selected[index] = selected[:, :, None] if call.queries == 1 else selected[:, None]

    def _mask_of(self, call: int, spec: AttentionSpec) -> torch.Tensor | None:
        selected = self._selected[call]
        return super()._mask_of(call, spec) if selected is None else selected
