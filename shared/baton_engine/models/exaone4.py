"""EXAONE 4 (LG AI Research, 2025): norms after each block and of each head, rotation where a layer has a window."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .olmo2 import NormedAfterLayer
from .sliding_windows import windows_in_turn


def rope_of_windows(config: LlamaConfig, layer: int) -> Rope | None:
    """Return the rope of a layer in models that rotate where there is a window, or everywhere if there is none."""
    everywhere = not any(config.sliding_windows)
    return config.rope if everywhere or config.sliding_windows[layer] else None


class Exaone4Config(LlamaConfig, frozen=True, kw_only=True):
    def rope_of(self, layer: int) -> Rope | None:
        return rope_of_windows(self, layer)


class Exaone4(Llama):
    layer = NormedAfterLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers = file.count("num_hidden_layers")
        return read_llama_config(
            Exaone4Config,
            file,
            Defaults(2048, num_kv_heads=32, rms_norm_eps=1e-5),
            windows_in_turn(file, layers, 4),
            qk_norm=True,
        )
