"""The text part of Molmo (Deitke et al., 2024): Qwen2 or OLMo 2 with the tensor names of Molmo 2."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.limited import Limited
from baton_engine.source import Source

from .llama import SILU, Defaults, Layer, LlamaConfig, read_llama_config
from .molmo2 import Molmo2, MolmoLayer
from .olmo2 import NormedAfterLayer, NormedQkv

# Fields that must be absent or have these values: the layers here compute nothing else.
_BUILT_IN = {"layer_norm_type": "rms", "weight_tying": False, "use_position_ids": True}


class MolmoConfig(LlamaConfig, frozen=True, kw_only=True):
    like_olmo: bool  # norms are after blocks, and over all queries and all keys
    limit: float | None  # of the absolute values of queries, keys and values, before any norm of them


class _QwenLayer(MolmoLayer):
    blocks = (None, None)

    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, MolmoConfig)
        qkv = super().qkv(config, source)
        return qkv if config.limit is None else Limited(qkv, config.limit)


class _OlmoLayer(_QwenLayer, NormedAfterLayer):
    post_norms = MolmoLayer.norms

    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        return NormedQkv(config, source, super().qkv(config, source))


def _layer(config: MolmoConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> Layer:
    return (_OlmoLayer if config.like_olmo else _QwenLayer)(config, source, layer, rotary)


class Molmo(Molmo2):
    layer = staticmethod(_layer)
    head_name = "ff_out"

    def parts(self, source: Source) -> tuple[Source, Source]:
        inside = source.at("model.transformer")
        return inside, inside

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, value in _BUILT_IN.items():
            file.require_absent(name, value)
        norms, after = file.flag("attention_layer_norm"), file.flag("norm_after")
        if norms != after:
            raise ConfigError(
                f"attention_layer_norm {norms} and norm_after {after} in config.json are not served: they must be equal"
            )
        inner = file.count("intermediate_size")
        if inner % 2:
            raise ConfigError(
                f"intermediate_size {inner} in config.json must be an even number: it counts gates and ups"
            )
        own = {
            # The tokens of images, which follow these, are never written.
            "vocab_size": file.count("embedding_size", file.count("vocab_size")),
            "intermediate_size": inner // 2,
            "tie_word_embeddings": False,
        }
        return read_llama_config(
            MolmoConfig,
            ConfigFile({**file.fields, **own}),
            Defaults(2048),
            activations=SILU,
            eps=file.number("layer_norm_eps", 1e-5),
            qkv_bias=file.flag("qkv_bias"),
            like_olmo=after,
            limit=None if file.fields.get("clip_qkv") is None else file.number("clip_qkv"),
        )
