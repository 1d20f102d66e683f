"""GPT-2 (Radford et al., 2019): learned positions, layer norms with biases, weights stored as [inputs, outputs]."""

import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.attention import Attention
from baton_engine.layers.embedding import Embedding, LearnedPositions, head
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import Mlp
from baton_engine.layers.norm import LayerNorm
from baton_engine.model_config import ModelConfig
from baton_engine.shard import Columns, Heads, Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS

from .decoder import Decoder

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


class Gpt2Config(ModelConfig, frozen=True, kw_only=True):
    layer_norm_epsilon: float
    activation: str


class Gpt2Layer:
    def __init__(self, config: Gpt2Config, source: Source, layer: int) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_epsilon
        attention, mlp = source.at("attn"), source.at("mlp")
        columns, rows, heads = Columns(source.ranks), Rows(source.ranks), Heads(source.ranks, config.head_dim)
        qkv = Linear(
            attention, ["c_attn"], [3 * hidden], hidden, bias=True, parts=[hidden] * 3, transposed=True, shard=heads
        )
        output = Linear(attention, ["c_proj"], [hidden], hidden, bias=True, transposed=True, shard=rows)
        up = Linear(mlp, ["c_fc"], [inner], hidden, bias=True, transposed=True, shard=columns)
        down = Linear(mlp, ["c_proj"], [hidden], inner, bias=True, transposed=True, shard=rows)
        self.input_norm = LayerNorm(source.at("ln_1"), hidden, eps)
        self.attention = Attention(config, layer, source, qkv, output)
        self.post_attention_norm = LayerNorm(source.at("ln_2"), hidden, eps)
        self.mlp = Mlp(up, down, ACTIVATIONS[config.activation])

    def __call__(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        x = self.attention(self.input_norm(x), ctx) + x
        return self.mlp(self.post_attention_norm(x)) + x


class Gpt2(Decoder):
    def __init__(self, config: Gpt2Config, source: Source, max_positions: int) -> None:
        super().__init__(source)
        # Tensor names begin with the outer module's name only in the checkpoints that transformers writes.
        inside = source.at("transformer") if "transformer.wte.weight" in source else source
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        self.embedding = Embedding(inside.at("wte"), config.vocab_size, hidden)
        self.positions = LearnedPositions(inside.at("wpe"), config.max_position_embeddings, hidden)
        self.layers = [
            Gpt2Layer(config, inside.at(f"h.{layer}"), layer) for layer in source.stage.layers(config.num_layers)
        ]
        self.norm = LayerNorm(inside.at("ln_f"), hidden, eps)
        self.head = head(source, self.embedding, config.tie_word_embeddings)

    @classmethod
    def read_config(cls, file: ConfigFile) -> Gpt2Config:
        for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            file.require_absent(name, False)
        file.require_absent("scale_attn_weights", True)
        hidden, layers, heads = file.count("n_embd", 768), file.count("n_layer", 12), file.count("n_head", 12)
        if hidden % heads:
            raise ConfigError(f"n_embd {hidden} is not a multiple of the {heads} heads")
        return Gpt2Config(
            architecture=file.architecture,
            vocab_size=file.count("vocab_size", 50257),
            hidden_size=hidden,
            intermediate_size=file.count("n_inner", 4 * hidden),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            max_position_embeddings=file.count("n_positions", 1024),
            tie_word_embeddings=file.flag("tie_word_embeddings", True),
            dtype=file.dtype,
            eos_token_ids=file.eos_token_ids,
            attention=(AttentionSpec(scale=(hidden // heads) ** -0.5),) * layers,
            layer_norm_epsilon=file.number("layer_norm_epsilon", 1e-5),
            activation=_ACTIVATIONS[file.choice("activation_function", "gelu_new", tuple(_ACTIVATIONS))],
        )

    def embed(self, ctx: Context) -> torch.Tensor:
        return self.embedding(ctx.ids).add_(self.positions(ctx.positions))
