"""Ministral 3 (Mistral AI, 2025): Mistral whose queries grow with their position."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.position_scale import PositionScaledAttention, stepped_scales
from baton_engine.layers.rope import Rope, read_rope, rope_fields
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .sliding_windows import same_window

_CONTEXT = 262144
_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


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
        file = ConfigFile({**file.fields, "rope_parameters": rope_fields(file) or _ROPE, "rope_scaling": None})
        rope = read_rope(file, file.count("max_position_embeddings", _CONTEXT))
        return read_llama_config(
            Ministral3Config,
            file,
            Defaults(_CONTEXT, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5),
            same_window(file),
            rope=rope,
            growth=read_growth(file, rope),
        )


def read_growth(file: ConfigFile, rope: Rope) -> float:
    """Return the growth of queries, as in stepped_scales; 0 = none. rope: that of config.json, which says where the
    growth begins."""
    growth = ConfigFile(rope_fields(file)).number("llama_4_scaling_beta", 0.0)
    if growth and not rope.original_max_position_embeddings:
        raise ConfigError("llama_4_scaling_beta in config.json needs a rope with original_max_position_embeddings")
    return growth
