"""Latent attention through torch's scaled_dot_product_attention, for CPU and for devices without a faster backend."""

import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.kv_cache import KvCache
from baton_engine.latent_spec import shared_spec
from baton_kernels.reference.latent import absorb_queries_reference, values_of_reference

from .backend import StepLimits
from .torch_sdpa import TorchSdpa, attention


class TorchLatent(TorchSdpa):
    """Absorbed attention is attention with one KV head: its keys are the latents, its values their first elements."""

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        super().__init__(cache, num_heads, specs, limits)
        self._spec = shared_spec(specs)

    def outputs(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], self._spec.value_dim)

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        assert up is not None
        latents, group, spec = self._cache.layer(layer)[0], self._cache.group_of(layer), self._spec
        by_head = None if sinks is None else sinks.view(1, -1, 1)
        for index, call in enumerate(self._calls):
            read = call.keys[spec.reach]
            # [keys, 1, latent_dim]. A latent that no query sees may hold anything, and 0 times NaN is NaN: it is 0
            # here.
            keys = latents.index_select(0, read.blocks[group]).flatten(0, 1).index_fill_(0, read.unseen, 0.0)
            rows, mask = call.rows, self._mask_of(index, spec)
            if call.queries > 1 and spec.expands(call.queries, call.length):
                self._attend_expanded(q[rows], keys[: call.length, 0], up, mask, by_head, out[rows])
                continue
            absorbed = absorb_queries_reference(q[rows], up, spec.rope_dim)
            attended = torch.empty_like(absorbed)
            if call.queries == 1:
                self._attend_decodes(absorbed, keys, keys, call.sequences, mask, spec, by_head, attended)
            else:
                self._attend_chunk(absorbed, keys, keys, mask, spec, by_head, attended)
            values_of_reference(attended[..., : spec.rank], up, out[rows])

    def _attend_expanded(
        self, q: torch.Tensor, latents: torch.Tensor, up: torch.Tensor, mask: torch.Tensor | None,
        sinks: torch.Tensor | None, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """latents: [keys, latent_dim] of one sequence. sinks: [1, heads, 1]."""
        spec = self._spec
        expanded = (latents[:, : spec.rank] @ up.flatten(0, 1).t()).view(len(latents), len(up), -1)
        expanded = expanded.transpose(0, 1)
        k, v = expanded[..., : -spec.value_dim], expanded[..., -spec.value_dim :]
        k = torch.cat([k, latents[:, spec.rank :].expand(len(up), -1, -1)], dim=2)
        mask = None if mask is None else mask[..., : len(latents)]
        result = attention(
            q.transpose(0, 1)[None], k[None], v[None], mask, spec, None if sinks is None else sinks.unsqueeze(-1)
        )
        out.copy_(result[0].transpose(0, 1))
