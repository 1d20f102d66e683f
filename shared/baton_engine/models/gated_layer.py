"""Layers whose attention has gates."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.context import Context
from baton_engine.layers.gated_attention import GatedAttention
from baton_engine.layers.linear import Linear
from baton_engine.shard import Heads
from baton_engine.source import Source

from .llama import LlamaConfig, LlamaLayer


class GatedLayer(LlamaLayer):
    """A Llama layer with norms of query and key heads, and with gates of what attention returns.

    attention_class: what computes attention. gate: the name of the projection to gates. gate_activation: as in
    GatedAttention.
    """

    attention_class: type[GatedAttention] = GatedAttention
    gate = "gate_proj"
    gate_activation: Callable[[torch.Tensor], torch.Tensor] = staticmethod(torch.sigmoid)

    def gates_of_head(self, config: LlamaConfig) -> int:
        """Return how many gates a head has: one for each of its numbers, or one for all."""
        return config.head_dim

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        output, norms, gates = (
            self.attended(config, source),
            self.qk_norms(config, source),
            self.attention_gates(config, source),
        )
        qkv, activation = self.qkv(config, source), self.gate_activation
        return self.attention_class(config, layer, source, qkv, gates, output, activation, rotary, norms)

    def attention_gates(self, config: LlamaConfig, source: Source) -> Linear:
        """Return the projection to the gates."""
        each = self.gates_of_head(config)
        shard = Heads(source.ranks, each)
        return Linear(source, [self.gate], [config.num_heads * each], config.hidden_size, shard=shard)
