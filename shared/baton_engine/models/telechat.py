"""TeleChat and TeleChat 2 (TeleAI, 2024): Llama with one matrix for keys and values, and biases where blocks end.

The original code raises the base of the rotation for texts beyond base_seqlen. Up to training_seqlen, which is what
engines serve, it has the base for a text of training_seqlen. The first two models have no base_seqlen in their
config.json: each has the number in its own code.
"""

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.fused_qkv import order_by_kv_head
from baton_engine.layers.linear import Linear
from baton_engine.layers.rope import Rope
from baton_engine.shard import Columns, Heads
from baton_engine.source import Source

from .llama import SILU, Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .qwen import ntk_alpha

# For each of Llama's names, the family's own name and default.
_NAMES = {
    "vocab_size": ("vocab_size", 160256), "intermediate_size": ("ffn_hidden_size", 12288),
    "num_hidden_layers": ("n_layer", 30), "num_attention_heads": ("n_head", 32),
    "max_position_embeddings": ("training_seqlen", 8192),
}  # fmt: skip
# base_seqlen of TeleChat 7B and 12B, by the size of hidden states and the number of layers.
_BASE_OF_THE_FIRST = {(4096, 30): 4096, (5120, 38): 8192}


class TelechatLayer(LlamaLayer):
    blocks = ("self_attention", "mlp")
    output = "dense"

    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        dim, queries, keys = config.head_dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # The second matrix has no queries.
        order = [*range(queries), *(queries + output for output in order_by_kv_head(0, config.num_kv_heads, dim))]
        return Linear(
            source, ["query", "key_value"], [queries, 2 * keys], config.hidden_size, order=order,
            parts=[queries, keys, keys], shard=Heads(source.ranks, dim),
        )  # fmt: skip

    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        inner, shard = config.intermediate_size, Columns(source.ranks)
        return Linear(source, ["gate_proj", "up_proj"], [inner, inner], config.hidden_size, shard=shard)


class Telechat(Llama):
    layer = TelechatLayer
    embedding_name, layers_name, final_norm = "word_embeddings", "h", "ln_f"

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("transformer"), source

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name in ("embed_layernorm", "apply_residual_connection_post_layernorm"):
            file.require_absent(name, False)
        fields = {ours: file.count(own, default) for ours, (own, default) in _NAMES.items()}
        fields["hidden_size"] = file.count("n_embed", file.count("hidden_size", 4096))
        hidden, heads, trained = (
            fields[name] for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")
        )
        dim = hidden // heads
        if hidden % heads or dim < 4:
            raise ConfigError(f"hidden_size {hidden} in config.json must be n_head {heads} times at least 4")
        base = _BASE_OF_THE_FIRST.get((hidden, fields["num_hidden_layers"]))
        alpha = ntk_alpha(trained, file.count("base_seqlen", base))
        return read_llama_config(
            LlamaConfig,
            ConfigFile({**file.fields, **fields, "head_dim": dim}),
            # The family's configuration class leaves this to that of transformers.
            Defaults(trained, tie_word_embeddings=True),
            rope=Rope("default", 10000.0 * alpha ** (dim / (dim - 2))),
            activations=SILU,
            eps=file.number("layer_norm_epsilon", 1e-5),
            output_bias=True,
            mlp_bias=True,
        )
