"""Qwen3, dense (Yang et al., 2025): Llama with normed queries and keys, and windows in some layers."""

from baton_engine.config_file import ConfigFile

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .qwen2 import within_one_chunk
from .sliding_windows import optional_windows


class Qwen3(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("is_causal", True)
        file = within_one_chunk(file)
        bias, windows = file.flag("attention_bias"), optional_windows(file, file.count("num_hidden_layers"))
        defaults = Defaults(32768, num_kv_heads=32, head_dim=128)
        return read_llama_config(LlamaConfig, file, defaults, windows, qkv_bias=bias, output_bias=bias, qk_norm=True)
