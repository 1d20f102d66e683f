"""InternLM2 and InternLM2.5 (Cai et al., 2024): Llama with other names, and with one matrix for the queries, keys and
values, ordered by key-value heads."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.fused_qkv import order_by_kv_head
from baton_engine.layers.linear import Linear
from baton_engine.source import Source

from .llama import SILU, Defaults, Llama, LlamaConfig, LlamaLayer, fused_qkv, read_llama_config


class InternLm2Layer(LlamaLayer):
    blocks = ("attention", "feed_forward")
    norms = ("attention_norm", "ffn_norm")
    output = "wo"
    gates, down = ("w1", "w3"), "w2"

    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        order = order_by_kv_head(config.num_heads, config.num_kv_heads, config.head_dim)
        return fused_qkv(config, source, "wqkv", order)


class InternLm2(Llama):
    layer = InternLm2Layer
    embedding_name, head_name = "tok_embeddings", "output"

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias = file.flag("bias", True)
        return read_llama_config(LlamaConfig, file, Defaults(2048), activations=SILU, qkv_bias=bias, output_bias=bias)
