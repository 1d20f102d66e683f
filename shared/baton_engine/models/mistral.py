"""Mistral (Jiang et al., "Mistral 7B", 2023): Llama with the same sliding window in every layer."""

from baton_engine.config_file import ConfigFile

from .llama import Defaults, Llama, LlamaConfig, read_llama_config


class Mistral(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # An explicit null turns the window off, unlike an absent field.
        window = None if file.fields.get("sliding_window", 0) is None else file.count("sliding_window", 4096)
        windows = (window,) * file.count("num_hidden_layers")
        return read_llama_config(LlamaConfig, file, Defaults(131072, num_kv_heads=8), windows)
