"""Ouro (Zhu et al., "Scaling Latent Reasoning via Looped Language Models", 2025): Llama with norms after blocks, too,
whose layers are computed several times for a token, with the last norm after each time.

Each time that a layer is computed, it counts as a layer of its own, as in HRM-Text. Its gates for early exits are not
read: with the threshold that the published models have, no token exits early.
"""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.source import Source

from .llama import SILU, Defaults, Layer, Llama, LlamaConfig, RotaryTables, read_llama_config
from .normed_around import NormedAround
from .sliding_windows import optional_windows


class OuroConfig(LlamaConfig, frozen=True, kw_only=True):
    passes: int  # how often each layer is computed

    def place_of(self, layer: int) -> int:
        return layer % (self.num_layers // self.passes)


class OuroLayer(NormedAround):
    post_norms = ("input_layernorm_2", "post_attention_layernorm_2")


class Ouro(Llama):
    layer: Callable[..., Layer] = OuroLayer

    def __init__(self, config: OuroConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        numbers = source.stage.layers(config.num_layers)
        self.begins_pass = [number > 0 and not config.place_of(number) for number in numbers]

    def make_layers(self, config: LlamaConfig, source: Source, rotary: RotaryTables) -> list[Layer]:
        layers: dict[int, OuroLayer] = {}
        made: list[Layer] = []
        for number in source.stage.layers(config.num_layers):
            place = config.place_of(number)
            if place not in layers:
                layers[place] = OuroLayer(config, source.at(f"layers.{place}"), number, rotary[config.rope])
            made.append(layers[place].of_layer(number))
        return made

    def __call__(self, ctx: Context) -> torch.Tensor:
        x: Any = self.begin(ctx)
        residual: Any = None
        for layer, begins_pass in zip(self.layers, self.begins_pass, strict=True):
            if begins_pass:
                x, residual = self.norm.add(x, residual)[0], None
            x, residual = layer(x, residual, ctx)
        normed, total = self.norm.add(x, residual)
        return normed if self.stage.is_last else total

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        passes, layers = file.count("total_ut_steps", 4), file.count("num_hidden_layers")
        file.require_absent("early_exit_threshold", 1.0)
        return read_llama_config(
            OuroConfig,
            ConfigFile({**file.fields, "num_hidden_layers": layers * passes}),
            Defaults(65536),
            optional_windows(file, layers) * passes,
            activations=SILU,
            passes=passes,
        )
