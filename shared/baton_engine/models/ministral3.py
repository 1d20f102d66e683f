"""Ministral 3 (Mistral AI, 2025): Mistral whose queries grow with their position."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.position_scale import PositionScaledAttention, stepped_scales
from baton_engine.layers.rope import rope_fields
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .sliding_windows import same_window


class Ministral3Config(LlamaConfig, frozen=True, kw_only=True):
    growth: float  # of queries, as in stepped_scales; 0 = none


class Ministral3Layer(LlamaLayer):
    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, Ministral3Config)
        assert rotary is not None
        if not config.growth:
            return super().make_attention(config, source, layer, rotary)
        trained = config.rope.original_max_position_embeddings
        scales = stepped_scales(trained, config.growth, len(rotary[0]), source.dtype, source.device)
        output = self.attended(config, source)
        return PositionScaledAttention(config, layer, source, self.qkv(config, source), output, rotary, scales)


class Ministral3(Llama):
    layer = Ministral3Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_llama_config(
            Ministral3Config,
            file,
            Defaults(262144, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5),
            same_window(file),
            growth=ConfigFile(rope_fields(file)).number("llama_4_scaling_beta", 0.0),
        )
