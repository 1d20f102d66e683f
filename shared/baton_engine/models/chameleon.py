"""Chameleon (Meta, "Chameleon: Mixed-Modal Early-Fusion Foundation Models", 2024): Llama with a LayerNorm of each head.

Tokens of images are in the vocabulary, but the published models write text only.
"""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.norm import HeadLayerNorms
from baton_engine.source import Source

from .layer_norm_llama import head_norms
from .llama import Defaults, Layer, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .olmo2 import NormedAfterLayer

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "eos_token_id": 2,
}  # fmt: skip
_HEAD_NORM_EPS = 1e-5


class ChameleonConfig(LlamaConfig, frozen=True, kw_only=True):
    """norm_after: norms are after blocks, not before. image_tokens: those that are never drawn."""

    norm_after: bool
    image_tokens: tuple[int, ...]


class _ChameleonLayer(LlamaLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        weights = head_norms(config, source, lambda kind, _: f"{kind}_norm.weight")
        biases = head_norms(config, source, lambda kind, _: f"{kind}_norm.bias")
        return HeadLayerNorms(super().qkv(config, source), weights, _HEAD_NORM_EPS, biases)


class _ChameleonAfterLayer(_ChameleonLayer, NormedAfterLayer):
    post_norms = _ChameleonLayer.norms


def _layer(
    config: ChameleonConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
) -> Layer:
    return (_ChameleonAfterLayer if config.norm_after else _ChameleonLayer)(config, source, layer, rotary)


class Chameleon(Llama):
    layer = staticmethod(_layer)

    def __init__(self, config: ChameleonConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        excluded = torch.zeros(config.vocab_size, dtype=torch.bool)
        excluded[list(config.image_tokens)] = True
        self.head.exclude(excluded.to(source.device))

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        heads, bias = file.count("num_attention_heads"), file.flag("attention_bias")
        file.require_absent("head_dim", file.count("hidden_size") // heads)
        return read_llama_config(
            ChameleonConfig,
            file,
            Defaults(4096, rms_norm_eps=1e-5),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias"),
            norm_after=file.flag("swin_norm"),
            image_tokens=_image_tokens(file),
        )


def _image_tokens(file: ConfigFile) -> tuple[int, ...]:
    """Return the tokens of parts of images, without those that begin and end an image."""
    names, size = file.fields.get("vocabulary_map"), file.count("vocab_size")
    if not isinstance(names, dict):
        raise ConfigError(f"vocabulary_map in config.json is {names!r}; it must have the id of each token")
    images = [id for name, id in names.items() if name.startswith("IMGIMG")]
    tokens = ConfigFile({"vocabulary_map": images}).integers("vocabulary_map")
    if max(tokens, default=0) >= size:
        raise ConfigError(f"vocabulary_map in config.json has token ids outside the vocabulary of {size}")
    return tuple(sorted(tokens))
