"""Helium 1 (Kyutai, 2025): Llama whose heads are rotated in pairs of neighbours."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope

from .llama import Defaults, Llama, LlamaConfig, read_llama_config


class Helium(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        context = file.count("max_position_embeddings", 4096)
        return read_llama_config(
            LlamaConfig,
            file,
            Defaults(4096, num_kv_heads=20, head_dim=128, rms_norm_eps=1e-8),
            rope=read_rope(file, context, theta=100000.0, interleaved=True),
            qkv_bias=file.flag("attention_bias"),
            mlp_bias=file.flag("mlp_bias"),
        )
