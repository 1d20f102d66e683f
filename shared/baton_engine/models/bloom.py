"""BLOOM (Scao et al., 2022): positions by ALiBi, layer norms with biases, one matrix for queries, keys and values."""

import math
from typing import TypeVar

import msgspec
import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.attention import Attention
from baton_engine.layers.embedding import Embedding, head
from baton_engine.layers.fused_qkv import order_by_kv_head
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import Mlp
from baton_engine.layers.norm import LayerNorm
from baton_engine.model_config import ModelConfig
from baton_engine.shard import Columns, Heads, Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS

from .decoder import Decoder

Kind = TypeVar("Kind", bound=ModelConfig)


class BloomConfig(ModelConfig, frozen=True, kw_only=True):
    layer_norm_epsilon: float
    residual_after_norm: bool  # the residual is the norms' output instead of their input


def alibi_slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """Return the slope of each head (Press et al., "Train Short, Test Long", 2022, and its reference code).

    For a power of two they are a geometric sequence. Otherwise the remaining heads take every other slope of the next
    power of two. most: the last slope of a power of two is 2 ** -most.
    """

    def sequence(count: int, power: int) -> list[float]:
        return [2.0 ** (-most * exponent / power) for exponent in range(1, count + 1)]

    power = 2 ** math.floor(math.log2(heads))
    between = sequence(2 * (heads - power), 2 * power)[::2]
    return tuple(sequence(power, power) + between)


def with_alibi(config: Kind, most: float = 8.0) -> Kind:
    """Return the config with ALiBi in all layers. most: as in alibi_slopes."""
    slopes = alibi_slopes(config.num_heads, most)
    specs = tuple(msgspec.structs.replace(spec, alibi=slopes) for spec in config.attention)
    return msgspec.structs.replace(config, attention=specs)


class BloomLayer:
    def __init__(self, config: BloomConfig, source: Source, layer: int) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_epsilon
        attention, mlp = source.at("self_attention"), source.at("mlp")
        order = order_by_kv_head(config.num_heads, config.num_kv_heads, config.head_dim)
        columns, rows, heads = Columns(source.ranks), Rows(source.ranks), Heads(source.ranks, config.head_dim)
        qkv = Linear(
            attention, ["query_key_value"], [3 * hidden], hidden, bias=True, order=order, parts=[hidden] * 3,
            shard=heads,
        )  # fmt: skip
        output = Linear(attention, ["dense"], [hidden], hidden, bias=True, shard=rows)
        up = Linear(mlp, ["dense_h_to_4h"], [inner], hidden, bias=True, shard=columns)
        down = Linear(mlp, ["dense_4h_to_h"], [hidden], inner, bias=True, shard=rows)
        self.input_norm = LayerNorm(source.at("input_layernorm"), hidden, eps)
        self.attention = Attention(config, layer, source, qkv, output)
        self.post_attention_norm = LayerNorm(source.at("post_attention_layernorm"), hidden, eps)
        self.mlp = Mlp(up, down, ACTIVATIONS["gelu_tanh"])
        self.residual_after_norm = config.residual_after_norm

    def __call__(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        normed = self.input_norm(x)
        residual = normed if self.residual_after_norm else x
        x = self.attention(normed, ctx) + residual
        normed = self.post_attention_norm(x)
        residual = normed if self.residual_after_norm else x
        return self.mlp(normed) + residual


class Bloom(Decoder):
    def __init__(self, config: BloomConfig, source: Source, max_positions: int) -> None:
        super().__init__(source)
        # Tensor names begin with the outer module's name only in the checkpoints that transformers writes.
        inside = source.at("transformer") if "transformer.word_embeddings.weight" in source else source
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        self.embedding = Embedding(inside.at("word_embeddings"), config.vocab_size, hidden)
        self.embedding_norm = LayerNorm(inside.at("word_embeddings_layernorm"), hidden, eps)
        self.layers = [
            BloomLayer(config, inside.at(f"h.{layer}"), layer) for layer in source.stage.layers(config.num_layers)
        ]
        self.norm = LayerNorm(inside.at("ln_f"), hidden, eps)
        self.head = head(source, self.embedding, config.tie_word_embeddings)

    @classmethod
    def read_config(cls, file: ConfigFile) -> BloomConfig:
        # Each of these fields has an older and a newer name.
        hidden, layers, heads = (
            file.count(new if new in file.fields else old)
            for old, new in (
                ("n_embed", "hidden_size"),
                ("num_hidden_layers", "n_layer"),
                ("num_attention_heads", "n_head"),
            )
        )
        if hidden % heads:
            raise ConfigError(f"hidden_size {hidden} is not a multiple of the {heads} attention heads")
        spec = AttentionSpec(scale=(hidden // heads) ** -0.5, alibi=alibi_slopes(heads))
        return BloomConfig(
            architecture=file.architecture,
            vocab_size=file.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            # ALiBi sets no limit. This is the length of the texts that the model was trained with.
            max_position_embeddings=file.count("seq_length", 2048),
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
            dtype=file.dtype,
            eos_token_ids=file.eos_token_ids,
            attention=(spec,) * layers,
            layer_norm_epsilon=file.number("layer_norm_epsilon", 1e-5),
            residual_after_norm=file.flag("apply_residual_connection_post_layernorm"),
        )

    def embed(self, ctx: Context) -> torch.Tensor:
        return self.embedding_norm(self.embedding(ctx.ids))
