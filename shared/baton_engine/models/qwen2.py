"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases of queries, keys and values, and windows in some layers."""

from baton_engine.config_file import ConfigFile

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sliding_windows import optional_windows


class Qwen2(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        windows = optional_windows(file, file.count("num_hidden_layers"))
        return read_llama_config(LlamaConfig, file, Defaults(32768, num_kv_heads=32), windows, qkv_bias=True)
