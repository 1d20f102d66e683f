"""GPT-2 (Radford et al., 2019): learned positions, layer norms with biases, weights stored as [inputs, outputs]."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.linear import Linear
from baton_engine.shard import Heads, Rows
from baton_engine.source import Source

from .gpt2_names import Gpt2Named, Gpt2NamedLayer, gpt2_fields, read_gpt2_like
from .layer_norm_llama import plain_mlp
from .llama import Defaults, Layer, LlamaConfig
from .unrotated import NO_ROPE, UnrotatedConfig, WithLearnedPositions


class Gpt2Layer(Gpt2NamedLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        hidden, shard = config.hidden_size, Heads(source.ranks, config.head_dim)
        parts = [hidden] * 3
        return Linear(source, ["c_attn"], [sum(parts)], hidden, bias=True, parts=parts, transposed=True, shard=shard)

    def attended(self, config: LlamaConfig, source: Source) -> Linear:
        hidden = config.hidden_size
        return Linear(source, [self.output], [hidden], hidden, bias=True, transposed=True, shard=Rows(source.ranks))

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        return plain_mlp(config, source.at("mlp"), self.projections, transposed=True)


class Gpt2(Gpt2Named, WithLearnedPositions):
    layer: Callable[..., Layer] = Gpt2Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("add_cross_attention", False)
        config = read_gpt2_like(
            UnrotatedConfig,
            gpt2_fields(file, 768, 12, 12, 1024),
            50257,
            Defaults(1024, tie_word_embeddings=True),
            scale=None if file.flag("scale_attn_weights", True) else 1.0,
            rope=NO_ROPE,
            qkv_bias=True,
            output_bias=True,
        )
        if not file.flag("scale_attn_by_inverse_layer_idx"):
            return config
        specs = tuple(
            msgspec.structs.replace(spec, scale=spec.scale / (layer + 1)) for layer, spec in enumerate(config.attention)
        )
        return msgspec.structs.replace(config, attention=specs)
