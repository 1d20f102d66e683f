"""EXAONE 4 (LG AI Research, 2025): norms after each block and of each head, rotation where a layer has a window."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .olmo2 import Olmo2Layer
from .sliding_windows import windows_in_turn


class Exaone4Config(LlamaConfig, frozen=True, kw_only=True):
    def rope_of(self, layer: int) -> Rope | None:
        # Models whose layers see everything rotate in all of them.
        everywhere = not any(spec.window for spec in self.attention)
        return self.rope if everywhere or self.attention[layer].window else None


class Exaone4Layer(Olmo2Layer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        # Norms are of each head, which attention computes.
        return LlamaLayer.qkv(self, config, source)


class Exaone4(Llama):
    layer = Exaone4Layer

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
