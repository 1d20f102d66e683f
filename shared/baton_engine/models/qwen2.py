"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases of queries, keys and values, and windows in some layers."""

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sliding_windows import optional_windows


def within_one_chunk(file: ConfigFile) -> ConfigFile:
    """Return the fields with max_position_embeddings of at most one chunk of dual chunk attention (An et al., 2024).

    Models for 1M tokens have this attention, which changes positions between chunks and is not served. Within the first
    chunk it is plain attention.
    """
    if file.fields.get("dual_chunk_attention_config") is None:
        return file
    chunks, context = file.part("dual_chunk_attention_config"), file.count("max_position_embeddings")
    size, local = chunks.count("chunk_size"), chunks.integer("local_size")
    if local >= size:
        raise ConfigError(f"local_size {local} in config.json must be below chunk_size {size}")
    return ConfigFile({**file.fields, "max_position_embeddings": min(context, size - local)})


class Qwen2(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("qk_norm", False)
        file.require_absent("is_causal", True)
        file = within_one_chunk(file)
        windows = optional_windows(file, file.count("num_hidden_layers"))
        return read_llama_config(LlamaConfig, file, Defaults(32768, num_kv_heads=32), windows, qkv_bias=True)
