"""Qwen of the first generation, and the text part of Qwen-VL (Bai et al., 2023): Llama with other names, and two ways
to contexts beyond seq_length.

use_logn_attn scales queries beyond seq_length (`log_scales`). use_dynamic_ntk raises the base of the rotation. The
original code takes the base from the length of each prompt, and keeps it while it generates. Here all sequences of an
engine have the base of its longest sequence: keys are cached with their rotation, so only with one base can requests
share cached keys, and neither chunks nor another pod change a token. An engine therefore serves seq_length tokens
unless --max-model-len says more. Up to seq_length, base and queries are the original's for every prompt. In an engine
for longer sequences they are those that the original has for a prompt of the longest.
"""

import math
from typing import Self

import msgspec
import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.embedding import Embedding, head
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.position_scale import PositionScaledAttention, log_scales
from baton_engine.layers.rope import Rope, rotary_tables
from baton_engine.shard import Columns, Heads, Rows
from baton_engine.source import Source

from .decoder import ResidualDecoder
from .llama import LlamaLayer
from .rotary_config import RotaryConfig


class QwenConfig(RotaryConfig, frozen=True, kw_only=True):
    layer_norm_epsilon: float
    bias: bool  # of all projections but that to queries, keys and values, which always has one
    trained_positions: int  # seq_length
    dynamic_ntk: bool
    logn: bool

    @property
    def default_model_len(self) -> int:
        return min(self.trained_positions, self.max_position_embeddings)

    def limited(self, max_positions: int) -> Self:
        if not self.dynamic_ntk:
            return self
        dim = self.rope.rotary_dim(self.head_dim)
        theta = self.rope.theta * ntk_alpha(max_positions, self.trained_positions) ** (dim / (dim - 2))
        return msgspec.structs.replace(self, rope=msgspec.structs.replace(self.rope, theta=theta))


def ntk_alpha(positions: int, trained: int) -> int:
    """Return the factor of the rotation's base, before its exponent, for so many positions: 1 up to the trained length,
    then 3, 7, 15, with each doubling of the length."""
    doublings = max(math.ceil(math.log2(positions / trained)), 0)
    return (2 << doublings) - 1


class QwenLayer(LlamaLayer):
    def __init__(
        self,
        config: QwenConfig,
        source: Source,
        layer: int,
        rotary: tuple[torch.Tensor, torch.Tensor],
        scales: torch.Tensor | None,
    ) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_epsilon
        attention, mlp, bias = source.at("attn"), source.at("mlp"), config.bias
        ranks = source.ranks
        qkv = Linear(
            attention, ["c_attn"], [3 * hidden], hidden, bias=True, parts=[hidden] * 3,
            order=config.rope.order(config.num_heads, config.num_heads, config.head_dim),
            shard=Heads(ranks, config.head_dim),
        )  # fmt: skip
        output = Linear(attention, ["c_proj"], [hidden], hidden, bias=bias, shard=Rows(ranks))
        self.attention = PositionScaledAttention(config, layer, source, qkv, output, rotary, scales)
        self.input_norm = RmsNorm(source.at("ln_1"), hidden, eps).before(self.attention)
        gate_up = Linear(mlp, ["w2", "w1"], [inner, inner], hidden, bias=bias, shard=Columns(ranks))
        down = Linear(mlp, ["c_proj"], [hidden], inner, bias=bias, shard=Rows(ranks))
        self.mlp = GatedMlp(gate_up, down, "silu")
        self.post_attention_norm = RmsNorm(source.at("ln_2"), hidden, eps).before(self.mlp)


class Qwen(ResidualDecoder):
    def __init__(self, config: QwenConfig, source: Source, max_positions: int) -> None:
        super().__init__(source)
        inside = source.at("transformer")
        self.embedding = Embedding(inside.at("wte"), config.vocab_size, config.hidden_size)
        rotary = rotary_tables(config.rope, config.head_dim, max_positions, source.device)
        scales = None
        if config.logn and max_positions > config.trained_positions:
            scales = log_scales(config.trained_positions, max_positions, source.dtype, source.device)
        self.layers = [
            QwenLayer(config, inside.at(f"h.{layer}"), layer, rotary, scales)
            for layer in source.stage.layers(config.num_layers)
        ]
        self.norm = RmsNorm(inside.at("ln_f"), config.hidden_size, config.layer_norm_epsilon)
        self.head = head(source, self.embedding, config.tie_word_embeddings)

    @classmethod
    def read_config(cls, file: ConfigFile) -> QwenConfig:
        layers, heads, hidden = (
            file.count(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        head_dim, inner, trained = (
            file.count("kv_channels", 128),
            file.count("intermediate_size"),
            file.count("seq_length"),
        )
        file.require_absent("scale_attn_weights", True)
        if trained < 2:
            raise ConfigError("seq_length in config.json must be at least 2")
        if head_dim * heads != hidden or inner % 2:
            raise ConfigError(
                f"hidden_size {hidden} in config.json must be kv_channels {head_dim} * {heads} heads, and "
                f"intermediate_size {inner} an even number"
            )
        rope = Rope("default", file.number("rotary_emb_base", 10000.0), partial=file.number("rotary_pct", 1.0))
        if not 0 < rope.partial <= 1 or rope.rotary_dim(head_dim) % 2 or rope.rotary_dim(head_dim) < 4:
            raise ConfigError(f"rotary_pct {rope.partial} of heads of {head_dim} is not an even number of at least 4")
        return QwenConfig(
            architecture=file.architecture,
            vocab_size=file.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=inner // 2,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            max_position_embeddings=file.count("max_position_embeddings", 8192),
            tie_word_embeddings=file.flag("tie_word_embeddings"),
            dtype=_dtype(file),
            eos_token_ids=file.eos_token_ids,
            attention=(AttentionSpec(scale=head_dim**-0.5),) * layers,
            rope=rope,
            layer_norm_epsilon=file.number("layer_norm_epsilon", 1e-6),
            bias=not file.flag("no_bias", True),
            trained_positions=trained,
            dynamic_ntk=file.flag("use_dynamic_ntk", True),
            logn=file.flag("use_logn_attn", True),
        )


def _dtype(file: ConfigFile) -> str:
    """Return the dtype of the checkpoint. The published ones are bfloat16, which only a flag may contradict."""
    if file.fields.get("dtype") or file.fields.get("torch_dtype"):
        return file.dtype
    return "float32" if file.flag("fp32") else "float16" if file.flag("fp16") else "bfloat16"
