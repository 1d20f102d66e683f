"""Ministral 8B (Mistral AI, 2024): Mistral with windows in the layers that config.json names."""

from baton_engine.config_file import ConfigFile

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sliding_windows import windows_in_turn


class Ministral(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers = file.count("num_hidden_layers")
        # Without layer_types all layers have windows.
        windows = windows_in_turn(file, layers, layers + 1)
        return read_llama_config(LlamaConfig, file, Defaults(131072, num_kv_heads=8), windows)
