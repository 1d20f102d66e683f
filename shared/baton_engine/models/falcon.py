"""Falcon (Almazrouei et al., 2023): attention and MLP in parallel, few KV heads; those of RefinedWeb with ALiBi."""

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
from baton_engine.layers.rope import read_rope, rotary_tables
from baton_engine.shard import Columns, Heads, Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS

from .bloom import alibi_slopes
from .decoder import Decoder
from .llama import HIDDEN_ACTS
from .rotary_config import RotaryConfig


class FalconConfig(RotaryConfig, frozen=True, kw_only=True):
    layer_norm_epsilon: float
    activation: str
    bias: bool
    parallel: bool  # the MLP reads the input of attention instead of its output
    two_norms: bool  # attention and MLP have separate norms, although they run in parallel


class FalconLayer:
    def __init__(
        self, config: FalconConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_epsilon
        attention, mlp = source.at("self_attention"), source.at("mlp")
        order = order_by_kv_head(config.num_heads, config.num_kv_heads, config.head_dim)
        columns, rows, heads = Columns(source.ranks), Rows(source.ranks), Heads(source.ranks, config.head_dim)
        kv = config.num_kv_heads * config.head_dim
        qkv = Linear(
            attention, ["query_key_value"], [len(order)], hidden, bias=config.bias, order=order,
            parts=[len(order) - 2 * kv, kv, kv], shard=heads,
        )  # fmt: skip
        output = Linear(attention, ["dense"], [hidden], hidden, bias=config.bias, shard=rows)
        up = Linear(mlp, ["dense_h_to_4h"], [inner], hidden, bias=config.bias, shard=columns)
        down = Linear(mlp, ["dense_4h_to_h"], [hidden], inner, bias=config.bias, shard=rows)
        names = ("ln_attn", "ln_mlp") if config.two_norms else ("input_layernorm", "post_attention_layernorm")
        self.attention_norm = LayerNorm(source.at(names[0]), hidden, eps)
        self.attention = Attention(config, layer, source, qkv, output, rotary)
        alone = config.parallel and not config.two_norms
        self.mlp_norm = None if alone else LayerNorm(source.at(names[1]), hidden, eps)
        self.mlp = Mlp(up, down, ACTIVATIONS[config.activation])
        self.parallel = config.parallel

    def __call__(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        normed = self.attention_norm(x)
        summed = self.attention(normed, ctx) + x
        if self.mlp_norm is not None:
            normed = self.mlp_norm(x if self.parallel else summed)
        return self.mlp(normed) + summed


class Falcon(Decoder):
    def __init__(self, config: FalconConfig, source: Source, max_positions: int) -> None:
        super().__init__(source)
        inside = source.at("transformer")
        hidden = config.hidden_size
        rotary = None
        if config.attention[0].alibi is None:
            rotary = rotary_tables(config.rope, config.head_dim, max_positions, source.device)
        self.embedding = Embedding(inside.at("word_embeddings"), config.vocab_size, hidden)
        self.layers = [
            FalconLayer(config, inside.at(f"h.{layer}"), layer, rotary)
            for layer in source.stage.layers(config.num_layers)
        ]
        self.norm = LayerNorm(inside.at("ln_f"), hidden, config.layer_norm_epsilon)
        self.head = head(source, self.embedding, config.tie_word_embeddings)

    @classmethod
    def read_config(cls, file: ConfigFile) -> FalconConfig:
        layers, heads = file.count("num_hidden_layers", 32), file.count("num_attention_heads", 71)
        hidden, context = file.count("hidden_size", 4544), file.count("max_position_embeddings", 2048)
        newer, parallel = file.flag("new_decoder_architecture"), file.flag("parallel_attn", True)
        kv_heads = file.count("num_kv_heads", heads) if newer else 1 if file.flag("multi_query", True) else heads
        if hidden % heads:
            raise ConfigError(f"hidden_size {hidden} is not a multiple of the {heads} attention heads")
        scale, slopes = (hidden // heads) ** -0.5, _slopes(heads) if file.flag("alibi") else None
        return FalconConfig(
            architecture=file.architecture,
            vocab_size=file.count("vocab_size", 65024),
            hidden_size=hidden,
            intermediate_size=file.count("ffn_hidden_size", 4 * hidden),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=hidden // heads,
            max_position_embeddings=context,
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
            dtype=file.dtype,
            eos_token_ids=file.eos_token_ids,
            attention=(AttentionSpec(scale=scale, alibi=slopes, rounded_alibi=slopes is not None),) * layers,
            layer_norm_epsilon=file.number("layer_norm_epsilon", 1e-5),
            activation=HIDDEN_ACTS[file.choice("activation", "gelu", tuple(HIDDEN_ACTS))],
            bias=file.flag("bias"),
            parallel=parallel,
            two_norms=newer and parallel and file.count("num_ln_in_parallel_attn", 2) == 2,
            rope=read_rope(file, context),
        )


def _slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes, which Falcon rounds to bfloat16."""
    return tuple(torch.tensor(alibi_slopes(heads)).bfloat16().tolist())
