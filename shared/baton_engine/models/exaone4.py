"""EXAONE 4 (LG AI Research, 2025): norms after each block and of each head, rotation where a layer has a window."""

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .olmo2 import NormedAfterLayer
from .sliding_windows import windows_in_turn


class RotatesInWindows:
    """A part of the config of a model whose layers rotate if they have a window.

    everywhere: layers without a window rotate, too, because config.json names no window.
    """

    attention: tuple[AttentionSpec, ...]
    rope: Rope
    everywhere: bool = False

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if self.everywhere or self.attention[layer].window else None


class Exaone4Config(RotatesInWindows, LlamaConfig, frozen=True, kw_only=True):
    everywhere: bool


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
            everywhere=file.fields.get("sliding_window", 0) is None,
        )
