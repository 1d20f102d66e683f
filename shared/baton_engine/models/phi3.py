"""Phi-3 and Phi-4 (Abdin et al., 2024): Llama with fused projections; Phi-4-mini rotates a part of each head."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.linear import Linear
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config


class Phi3Layer(LlamaLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        outputs = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        order = config.rope.order(config.num_heads, config.num_kv_heads, config.head_dim)
        return Linear(source, ["qkv_proj"], [outputs], config.hidden_size, order=order)

    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        return Linear(source, ["gate_up_proj"], [2 * config.intermediate_size], config.hidden_size)


class Phi3(Llama):
    layer = Phi3Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        window = None if file.fields.get("sliding_window") is None else file.count("sliding_window")
        context = file.count("max_position_embeddings", 4096)
        return read_llama_config(
            LlamaConfig,
            file,
            Defaults(4096, rms_norm_eps=1e-5),
            (window,) * file.count("num_hidden_layers"),
            rope=read_rope(file, context, partial=1.0),
        )
