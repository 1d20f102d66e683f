"""GPT-NeoX (Black et al., 2022) and Pythia: attention and MLP in parallel, rotation of a part of each head."""

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
from baton_engine.layers.rope import Rope, read_rope, rotary_tables
from baton_engine.shard import Columns, Heads, Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import ACTIVATIONS

from .decoder import Decoder
from .llama import HIDDEN_ACTS
from .rotary_config import RotaryConfig


class GptNeoXConfig(RotaryConfig, frozen=True, kw_only=True):
    layer_norm_eps: float
    activation: str
    bias: bool  # of the attention's projections
    parallel: bool  # the MLP reads the input of attention instead of its output


class GptNeoXLayer:
    def __init__(
        self, config: GptNeoXConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        attention, mlp = source.at("attention"), source.at("mlp")
        order = order_by_kv_head(config.num_heads, config.num_kv_heads, config.head_dim)
        permuted = config.rope.order(config.num_heads, config.num_heads, config.head_dim)
        order = order if permuted is None else [order[output] for output in permuted]
        columns, rows, heads = Columns(source.ranks), Rows(source.ranks), Heads(source.ranks, config.head_dim)
        qkv = Linear(
            attention, ["query_key_value"], [3 * hidden], hidden, bias=config.bias, order=order, parts=[hidden] * 3,
            shard=heads,
        )  # fmt: skip
        output = Linear(attention, ["dense"], [hidden], hidden, bias=config.bias, shard=rows)
        up = Linear(mlp, ["dense_h_to_4h"], [inner], hidden, bias=True, shard=columns)
        down = Linear(mlp, ["dense_4h_to_h"], [hidden], inner, bias=True, shard=rows)
        self.input_norm = LayerNorm(source.at("input_layernorm"), hidden, eps)
        self.attention = Attention(config, layer, source, qkv, output, rotary)
        self.post_attention_norm = LayerNorm(source.at("post_attention_layernorm"), hidden, eps)
        self.mlp = Mlp(up, down, ACTIVATIONS[config.activation])
        self.parallel = config.parallel

    def __call__(self, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        attended = self.attention(self.input_norm(x), ctx)
        if self.parallel:
            return self.mlp(self.post_attention_norm(x)) + attended + x
        x = attended + x
        return self.mlp(self.post_attention_norm(x)) + x


def read_neox_rope(file: ConfigFile, context: int, partial: float) -> Rope:
    """Return the rope of a config.json, which has either rope_parameters or the family's own older fields. partial: the
    fraction of a head that is rotated where none is named.

    rope_theta and partial_rotary_factor beside rope_parameters are copies of those older fields, which transformers
    does not read.
    """
    theta, partial = file.number("rotary_emb_base", 10000.0), file.number("rotary_pct", partial)
    return read_rope(ConfigFile({**file.fields, "rope_theta": theta, "partial_rotary_factor": None}), context, partial)


class GptNeoX(Decoder):
    def __init__(self, config: GptNeoXConfig, source: Source, max_positions: int) -> None:
        super().__init__(source)
        inside = source.at("gpt_neox")
        hidden = config.hidden_size
        rotary = rotary_tables(config.rope, config.head_dim, max_positions, source.device)
        self.embedding = Embedding(inside.at("embed_in"), config.vocab_size, hidden)
        self.layers = [
            GptNeoXLayer(config, inside.at(f"layers.{layer}"), layer, rotary)
            for layer in source.stage.layers(config.num_layers)
        ]
        self.norm = LayerNorm(inside.at("final_layer_norm"), hidden, config.layer_norm_eps)
        self.head = head(source, self.embedding, config.tie_word_embeddings, "embed_out")

    @classmethod
    def read_config(cls, file: ConfigFile) -> GptNeoXConfig:
        layers, heads = file.count("num_hidden_layers", 44), file.count("num_attention_heads", 64)
        hidden, context = file.count("hidden_size", 6144), file.count("max_position_embeddings", 2048)
        if hidden % heads:
            raise ConfigError(f"hidden_size {hidden} is not a multiple of the {heads} attention heads")
        rope = read_neox_rope(file, context, 0.25)
        return GptNeoXConfig(
            architecture=file.architecture,
            vocab_size=file.count("vocab_size", 50432),
            hidden_size=hidden,
            intermediate_size=file.count("intermediate_size", 24576),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            max_position_embeddings=context,
            tie_word_embeddings=file.flag("tie_word_embeddings"),
            dtype=file.dtype,
            eos_token_ids=file.eos_token_ids,
            attention=(AttentionSpec(scale=(hidden // heads) ** -0.5),) * layers,
            layer_norm_eps=file.number("layer_norm_eps", 1e-5),
            activation=HIDDEN_ACTS[file.choice("hidden_act", "gelu", tuple(HIDDEN_ACTS))],
            bias=file.flag("attention_bias", True),
            parallel=file.flag("use_parallel_residual", True),
            rope=rope,
        )
