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
    """A Llama layer with norms of query and key heads, and with a gate for each number that attention returns."""

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        output, norms = self.attended(config, source), self.qk_norms(config, source)
        size, shard = config.num_heads * config.head_dim, Heads(source.ranks, config.head_dim)
        gate = Linear(source, ["gate_proj"], [size], config.hidden_size, shard=shard)
        return GatedAttention(config, layer, source, self.qkv(config, source), gate, output, rotary, norms)
