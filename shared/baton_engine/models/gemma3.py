"""Gemma 3, text only (Gemma Team, 2025): norms before and after each block, sliding windows, two RoPE bases."""

from typing import Any, Self, TypeVar

import msgspec
import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.inputs import OutputRows
from baton_engine.layers.attention import Attention
from baton_engine.layers.embedding import Embedding, Head
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rope import Rope, rotary_tables
from baton_engine.model_config import ModelConfig
from baton_engine.shard import Columns, Heads, Rows
from baton_engine.source import Source

from .decoder import ResidualDecoder
from .llama import HIDDEN_ACTS
from .sliding_windows import ropes_by_window

_OFFSET = 1.0  # the checkpoint stores a norm's weight minus this


class Gemma3Config(ModelConfig, frozen=True, kw_only=True):
    rms_norm_eps: float
    activation: str
    bias: bool  # of the attention's projections
    qk_norm: bool
    rope: Rope  # of layers without a window
    window_rope: Rope
    logit_softcap: float  # logits become softcap * tanh(logits / softcap); 0 = off

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "rope": self.rope.layout, "window_rope": self.window_rope.layout}

    def limited(self, max_positions: int) -> Self:
        rope, window_rope = self.rope.limited(max_positions), self.window_rope.limited(max_positions)
        return msgspec.structs.replace(self, rope=rope, window_rope=window_rope)


Kind = TypeVar("Kind", bound=Gemma3Config)


def read_softcap(file: ConfigFile, name: str, default: float) -> float:
    """Return a softcap; 0 = off. An explicit null turns it off, unlike an absent field."""
    return 0.0 if file.fields.get(name, 0) is None else file.number(name, default)


def set_softcap(head: Head, cap: float) -> None:
    """Apply a softcap to the logits of a head; 0 = none."""
    if cap:
        head.finish_with(lambda logits: logits.div_(cap).tanh_().mul_(cap))


def read_gemma_config(kind: type[Kind], file: ConfigFile, context: int, **facts: Any) -> Kind:
    """Return the config of a config.json with Gemma's fields. facts: the fields in which the versions differ."""
    file.require_absent("use_bidirectional_attention", False)
    heads, kv_heads = file.count("num_attention_heads", 8), file.count("num_key_value_heads", 4)
    head_dim = file.count("head_dim", 256)
    return kind(
        architecture=file.architecture,
        hidden_size=file.count("hidden_size", 2304),
        intermediate_size=file.count("intermediate_size", 9216),
        num_layers=file.count("num_hidden_layers", 26),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=file.flag("tie_word_embeddings", True),
        dtype=file.dtype,
        eos_token_ids=file.eos_token_ids or (1,),
        rms_norm_eps=file.number("rms_norm_eps", 1e-6),
        bias=file.flag("attention_bias"),
        activation=HIDDEN_ACTS[file.choice("hidden_activation", "gelu_pytorch_tanh", tuple(HIDDEN_ACTS))],
        **facts,
    )


class Gemma3Layer:
    def __init__(
        self, config: Gemma3Config, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        hidden, inner, dim, eps = config.hidden_size, config.intermediate_size, config.head_dim, config.rms_norm_eps
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        attention, mlp = source.at("self_attn"), source.at("mlp")
        columns, rows, heads = Columns(source.ranks), Rows(source.ranks), Heads(source.ranks, dim)
        qkv = Linear(attention, ["q_proj", "k_proj", "v_proj"], [q, kv, kv], hidden, bias=config.bias, shard=heads)
        output = Linear(attention, ["o_proj"], [hidden], q, bias=config.bias, shard=rows)
        norms = None
        if config.qk_norm:
            q_norm, k_norm = (RmsNorm(attention.at(name), dim, eps, _OFFSET) for name in ("q_norm", "k_norm"))
            norms = q_norm, k_norm
        gate_up = Linear(mlp, ["gate_proj", "up_proj"], [inner, inner], hidden, shard=columns)
        down = Linear(mlp, ["down_proj"], [hidden], inner, shard=rows)
        self.attention = Attention(config, layer, source, qkv, output, rotary, norms)
        self.input_norm = RmsNorm(source.at("input_layernorm"), hidden, eps, _OFFSET).before(self.attention)
        self.post_attention_norm = RmsNorm(source.at("post_attention_layernorm"), hidden, eps, _OFFSET)
        self.mlp = GatedMlp(gate_up, down, config.activation)
        self.pre_mlp_norm = RmsNorm(source.at("pre_feedforward_layernorm"), hidden, eps, _OFFSET).before(self.mlp)
        self.post_mlp_norm = RmsNorm(source.at("post_feedforward_layernorm"), hidden, eps, _OFFSET)

    def __call__(self, x: OutputRows, residual: torch.Tensor | None, ctx: Context) -> tuple[OutputRows, torch.Tensor]:
        normed, residual = self.input_norm.add(x, residual)
        x = self.post_attention_norm.later(self.attention(normed, ctx))
        normed, residual = self.pre_mlp_norm.add(x, residual)
        return self.post_mlp_norm.later(self.mlp(normed)), residual


class Gemma3(ResidualDecoder):
    def __init__(self, config: Gemma3Config, source: Source, max_positions: int) -> None:
        super().__init__(source)
        inside, source = self.parts(source)
        hidden = config.hidden_size
        full, window = (
            rotary_tables(rope, config.head_dim, max_positions, source.device)
            for rope in (config.rope, config.window_rope)
        )
        self.embedding = Embedding(inside.at("embed_tokens"), config.vocab_size, hidden, scale=hidden**0.5)
        self.layers = [
            Gemma3Layer(
                config, inside.at(f"layers.{layer}"), layer, full if config.attention[layer].window is None else window
            )
            for layer in source.stage.layers(config.num_layers)
        ]
        self.norm = RmsNorm(inside.at("norm"), hidden, config.rms_norm_eps, _OFFSET)
        self.head = self.make_head(config, source)
        set_softcap(self.head, config.logit_softcap)

    @classmethod
    def read_config(cls, file: ConfigFile) -> Gemma3Config:
        # transformers applies no softcap to scores in this family, nor to the logits of the model that reads images.
        file.require_absent("attn_logit_softcapping")
        if file.architecture != "Gemma3ForCausalLM":
            file.require_absent("final_logit_softcapping")
        layers, context = file.count("num_hidden_layers", 26), file.count("max_position_embeddings", 131072)
        scale, window = file.number("query_pre_attn_scalar", 256) ** -0.5, file.count("sliding_window", 4096)
        theta, window_theta = file.number("rope_theta", 1e6), file.number("rope_local_base_freq", 10000.0)
        rope, window_rope = ropes_by_window(file, context, theta, window_theta)
        return read_gemma_config(
            Gemma3Config,
            file,
            context,
            vocab_size=file.count("vocab_size", 262208),
            attention=tuple(
                AttentionSpec(scale=scale, window=window if kind == "sliding_attention" else None)
                for kind in _layer_types(file, layers)
            ),
            rope=rope,
            window_rope=window_rope,
            qk_norm=True,
            logit_softcap=read_softcap(file, "final_logit_softcapping", 0.0),
        )


def _layer_types(file: ConfigFile, layers: int) -> list[str]:
    """Return the kind of each layer: that of layer_types, or else full attention every sliding_window_pattern
    layers."""
    types = file.layer_types("layer_types", layers)
    if types is not None:
        return types
    name = "sliding_window_pattern" if "sliding_window_pattern" in file.fields else "_sliding_window_pattern"
    pattern = file.count(name, 6)
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
