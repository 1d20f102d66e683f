"""OLMo 2 (OLMo Team, "2 OLMo 2 Furious", 2025): Llama with norms after each block and across all heads of q and k."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.inputs import InputRows, inputs_of
from baton_engine.layers.norm import RmsNorm
from baton_engine.shard import Heads
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config


class NormedQkv:
    """A projection to queries, keys and values, with one norm over the queries of all heads and one over all keys.

    qkv: without the norms.
    """

    def __init__(self, config: LlamaConfig, source: Source, qkv: Callable[[Any], torch.Tensor]) -> None:
        self._qkv, self._ranks, self.inputs = qkv, source.ranks, inputs_of(qkv)
        dim, eps, order = config.head_dim, config.rms_norm_eps, config.rope.order(1, 0, config.head_dim)
        sizes = config.num_heads * dim, config.num_kv_heads * dim
        self._norms = [
            RmsNorm(source.at(name), size, eps, part=part)
            for name, size, part in zip(
                ("q_norm", "k_norm"), sizes, Heads(source.ranks, dim).outputs(sizes), strict=True
            )
        ]
        if order is not None:
            for norm in self._norms:
                norm.weight = norm.weight.view(-1, dim)[:, order].flatten()

    def __call__(self, x: InputRows) -> torch.Tensor:
        qkv = self._qkv(x)
        q, k = (len(norm.weight) for norm in self._norms)
        parts = [qkv[:, :q].contiguous(), qkv[:, q : q + k].contiguous()]
        if self._ranks.count == 1:
            normed = [norm(part) for norm, part in zip(self._norms, parts, strict=True)]
        else:
            # If several ranks have the same key heads, each head is counted by the same number of ranks.
            squares = torch.stack([part.float().square().sum(dim=-1) for part in parts])
            sums = self._ranks.sum(squares)
            normed = [
                norm.given(part, total / (len(norm.weight) * self._ranks.count))
                for norm, part, total in zip(self._norms, parts, sums, strict=True)
            ]
        return torch.cat([*normed, qkv[:, q + k :]], dim=1)


class NormedAfterLayer(LlamaLayer):
    """A layer with a norm after each block and none before it. post_norms: their names."""

    post_norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention = self.make_attention(config, self.block(source, 0), layer, rotary)
        self.attended_norm = RmsNorm(source.at(self.post_norms[0]), hidden, eps)
        self.mlp = self.make_mlp(config, source, layer)
        self.post_mlp_norm = RmsNorm(source.at(self.post_norms[1]), hidden, eps)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else residual.add_(x)
        residual.add_(self.attended_norm(self.attention(residual, ctx)))
        return self.post_mlp_norm(self.mlp(residual)), residual


class Olmo2Layer(NormedAfterLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        return NormedQkv(config, source, super().qkv(config, source))


class Olmo2(Llama):
    layer = Olmo2Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias = file.flag("attention_bias")
        defaults = Defaults(2048, rms_norm_eps=1e-5)
        return read_llama_config(LlamaConfig, file, defaults, qkv_bias=bias, output_bias=bias)
