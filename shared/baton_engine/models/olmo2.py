"""OLMo 2 (OLMo Team, "2 OLMo 2 Furious", 2025): Llama with norms after each block and across all heads of q and k."""

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.inputs import Rows
from baton_engine.layers.attention import Attention
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import RmsNorm
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, read_llama_config


class NormedQkv:
    """A projection to queries, keys and values, with one norm over the queries of all heads and one over all keys."""

    def __init__(self, qkv: Linear, q_norm: RmsNorm, k_norm: RmsNorm) -> None:
        self._qkv, self._q_norm, self._k_norm = qkv, q_norm, k_norm
        self.inputs = qkv.inputs

    def __call__(self, x: Rows) -> torch.Tensor:
        qkv = self._qkv(x)
        q, k = len(self._q_norm.weight), len(self._k_norm.weight)
        parts = qkv[:, :q].contiguous(), qkv[:, q : q + k].contiguous()
        return torch.cat([self._q_norm(parts[0]), self._k_norm(parts[1]), qkv[:, q + k :]], dim=1)


class Olmo2Layer:
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = source.at("self_attn"), source.at("mlp")
        qkv = Linear(attention, ["q_proj", "k_proj", "v_proj"], [q, kv, kv], hidden, bias=config.qkv_bias)
        normed = NormedQkv(qkv, RmsNorm(attention.at("q_norm"), q, eps), RmsNorm(attention.at("k_norm"), kv, eps))
        output = Linear(attention, ["o_proj"], [hidden], q, bias=config.output_bias)
        gate_up = Linear(mlp, ["gate_proj", "up_proj"], [inner, inner], hidden)
        down = Linear(mlp, ["down_proj"], [hidden], inner)
        self.attention = Attention(config, layer, source.ops, normed, output, rotary)
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
