"""Command R7B and Command A (Cohere, 2025): Command R with windows, and without rotation in layers that see all."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope

from .cohere import Cohere, CohereConfig, read_cohere_config
from .llama import LlamaConfig
from .sliding_windows import windows_in_turn


class Cohere2Config(CohereConfig, frozen=True, kw_only=True):
    def rope_of(self, layer: int) -> Rope | None:
        return None if self.attention[layer].window is None else self.rope


class Cohere2(Cohere):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        windows = windows_in_turn(file, file.count("num_hidden_layers"), 4)
        return read_cohere_config(Cohere2Config, file, windows, theta=10000.0)
