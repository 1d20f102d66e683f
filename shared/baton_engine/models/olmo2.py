"""OLMo 2 (OLMo Team, "2 OLMo 2 Furious", 2025): Llama with norms after each block and across all heads of q and k."""

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.inputs import InputRows
from baton_engine.layers.attention import Attention
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import RmsNorm
from baton_engine.shard import Columns, Heads, Rows
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, read_llama_config


class NormedQkv:
    """A projection to queries, keys and values, with one norm over the queries of all heads and one over all keys.

    sizes: outputs of the queries and of the keys. shard: that of qkv.
    """

    def __init__(self, source: Source, qkv: Linear, sizes: tuple[int, int], eps: float, shard: Heads) -> None:
        self._qkv, self._ranks, self.inputs = qkv, source.ranks, qkv.inputs
        parts = shard.outputs(sizes)
        self._norms = [
            RmsNorm(source.at(name), size, eps, part=part)
            for name, size, part in zip(("q_norm", "k_norm"), sizes, parts, strict=True)
        ]

    def __call__(self, x: InputRows) -> torch.Tensor:
        qkv = self._qkv(x)
        q, k = (len(norm.weight) for norm in self._norms)
        parts = [qkv[:, :q].contiguous(), qkv[:, q : q + k].contiguous()]
        if self._ranks.count == 1:
            normed = [norm(part) for norm, part in zip(self._norms, parts, strict=True)]
        else:
            # Where several ranks have the same key head, all heads are counted equally often.
            squares = torch.stack([part.float().square().sum(dim=-1) for part in parts])
            sums = self._ranks.sum(squares)
            normed = [
                norm.given(part, total / (len(norm.weight) * self._ranks.count))
                for norm, part, total in zip(self._norms, parts, sums, strict=True)
            ]
        return torch.cat([*normed, qkv[:, q + k :]], dim=1)


class Olmo2Layer:
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = source.at("self_attn"), source.at("mlp")
        columns, rows, heads = Columns(source.ranks), Rows(source.ranks), Heads(source.ranks, config.head_dim)
        qkv = Linear(attention, ["q_proj", "k_proj", "v_proj"], [q, kv, kv], hidden, bias=config.qkv_bias, shard=heads)
        normed = NormedQkv(attention, qkv, (q, kv), eps, heads)
        output = Linear(attention, ["o_proj"], [hidden], q, bias=config.output_bias, shard=rows)
        gate_up = Linear(mlp, ["gate_proj", "up_proj"], [inner, inner], hidden, shard=columns)
        down = Linear(mlp, ["down_proj"], [hidden], inner, shard=rows)
        self.attention = Attention(config, layer, source, normed, output, rotary)
        self.post_attention_norm = RmsNorm(source.at("post_attention_layernorm"), hidden, eps)
        self.mlp = GatedMlp(gate_up, down, "silu")
        self.post_mlp_norm = RmsNorm(source.at("post_feedforward_layernorm"), hidden, eps)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else residual.add_(x)
        residual.add_(self.post_attention_norm(self.attention(residual, ctx)))
        return self.post_mlp_norm(self.mlp(residual)), residual


class Olmo2(Llama):
    layer = Olmo2Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias = file.flag("attention_bias")
        defaults = Defaults(2048, rms_norm_eps=1e-5)
        return read_llama_config(LlamaConfig, file, defaults, qkv_bias=bias, output_bias=bias)
