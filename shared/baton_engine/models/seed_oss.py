"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values."""

from baton_engine.config_file import ConfigFile

from .llama import Defaults, Llama, LlamaConfig, read_llama_config


class SeedOss(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_llama_config(
            LlamaConfig,
            file,
            Defaults(524288, num_kv_heads=8, head_dim=128),
            qkv_bias=file.flag("attention_bias", True),
            output_bias=file.flag("attention_out_bias"),
            mlp_bias=file.flag("mlp_bias"),
        )
