"""LFM3 (Liquid AI, 2026): short convolutions, attention with gates, with windows or without, and norms around both."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.rope import Rope
from baton_engine.source import Source

from .gated_layer import GatedLayer
from .lfm2 import Convolutions, WithConvolutions, check_channels, convolution
from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .normed_around import NormedAround
from .sliding_windows import WithWindowRope, ropes_by_window

_CONTEXT = 128_000
# Those of transformers' configuration class.
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_KINDS = ("full_attention", "sliding_attention", "conv")


class Lfm3Config(WithConvolutions, WithWindowRope, LlamaConfig, frozen=True, kw_only=True):
    """gated: attention has gates."""

    window_rope: Rope
    convolutions: Convolutions
    gated: bool


class Lfm3Layer(NormedAround, GatedLayer):
    blocks = (None, "feed_forward")
    norms = ("operator_norm", "ffn_norm")
    post_norms = ("post_operator_norm", "post_ffn_norm")
    gates = ("w1", "w3")
    down = "w2"

    def gates_of_head(self, config: LlamaConfig) -> int:
        return 1

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, Lfm3Config)
        if layer in config.convolutions.layers:
            return convolution(config, source.at("conv"), layer)
        source = source.at("self_attn")
        if config.gated:
            return super().make_attention(config, source, layer, rotary)
        return LlamaLayer.make_attention(self, config, source, layer, rotary)


class Lfm3(Llama):
    layer = Lfm3Layer
    final_norm = "embedding_norm"

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("use_sandwich_norm", True)
        layers, length = file.count("num_hidden_layers"), file.count("conv_L_cache", 7)
        kinds = file.layer_types("layer_types", layers, _KINDS) or list(map(_kind, range(layers)))
        convolving = frozenset(layer for layer, kind in enumerate(kinds) if kind == "conv")
        windows = {"conv": length, "sliding_attention": file.count("sliding_window", 256), "full_attention": None}
        file = ConfigFile({**file.fields, "rope_parameters": file.fields.get("rope_parameters") or _ROPES})
        rope, window_rope = ropes_by_window(file, file.count("max_position_embeddings", _CONTEXT), 1e6, 1e4)
        config = read_llama_config(
            Lfm3Config,
            file,
            Defaults(_CONTEXT, num_kv_heads=4, head_dim=128, tie_word_embeddings=True),
            tuple(windows[kind] for kind in kinds),
            rope=rope,
            window_rope=window_rope,
            eps=file.number("norm_eps", 1e-5),
            qkv_bias=file.flag("attention_bias"),
            output_bias=file.flag("attention_bias"),
            qk_norm=True,
            convolutions=Convolutions(convolving, length, file.count("hidden_size"), file.flag("conv_bias")),
            gated=file.flag("use_attention_gate", True),
        )
        check_channels(config)
        return config


def _kind(layer: int) -> str:
    """Return the kind of a layer in models whose config.json does not name them."""
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer % 4 == 0 and layer > 0 else "conv"
