"""Latent attention of layers that have several kinds of it, each of which has a backend of its own."""

from typing import ClassVar

import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.kv_cache import KvCache
from baton_engine.latent_spec import IndexedLatentSpec, LatentSpec, latent_specs

from .backend import AttentionBackend, AttentionBatch, SelectingBackend, StepLimits


class LatentsByLayer:
    """Latent attention of layers with different sizes or windows, some of which may select the tokens that they attend
    to. Kinds with queries of one size have values of one size.

    kind, selecting_kind: the backends of a kind that attends to all tokens or to those of a window, and of one that
    attends to selected tokens.
    """

    name: str
    kind: ClassVar[type[AttentionBackend]]
    selecting_kind: ClassVar[type[SelectingBackend]]

    def __init__(self, cache: KvCache, num_heads: int, specs: tuple[AttentionSpec, ...], limits: StepLimits) -> None:
        self._selecting: dict[LatentSpec, SelectingBackend] = {}
        self._backends: dict[LatentSpec, AttentionBackend] = {}
        self._value_dims: dict[int, int] = {}
        for spec in latent_specs(specs):
            self._value_dims[spec.query_dim] = spec.value_dim
            if isinstance(spec, IndexedLatentSpec):
                self._selecting[spec] = self.selecting_kind(cache, num_heads, (spec,), limits)
                self._backends[spec] = self._selecting[spec]
            else:
                self._backends[spec] = self.kind(cache, num_heads, (spec,), limits)
        self._specs = [spec if isinstance(spec, LatentSpec) else None for spec in specs]

    def prepare(self, batch: AttentionBatch) -> None:
        for backend in self._backends.values():
            backend.prepare(batch)

    def select(self, layer: int, queries: torch.Tensor, weights: torch.Tensor | None) -> None:
        self._selecting[self._spec(layer)].select(layer, queries, weights)

    def outputs(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty(*q.shape[:2], self._value_dims[q.shape[2]])

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._backends[self._spec(layer)].attend(layer, q, out, sinks, up)

    def _spec(self, layer: int) -> LatentSpec:
        spec = self._specs[layer]
        assert spec is not None
        return spec
