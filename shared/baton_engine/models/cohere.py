"""Command R and R+ (Cohere, 2024): attention and a gated MLP in parallel after one LayerNorm."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.norm import HeadLayerNorms
from baton_engine.layers.rope import Rope, read_rope
from baton_engine.source import Source

from .layer_norm_llama import LayerNormConfig, LayerNormLayer, LayerNormLlama, head_norms
from .llama import Defaults, Kind, Layer, LlamaConfig, read_llama_config

THETA = 500000.0


class CohereConfig(LayerNormConfig, frozen=True, kw_only=True):
    """logit_scale: the factor of logits. head_norms: LayerNorms of queries and keys."""

    logit_scale: float
    head_norms: bool = False


class CohereLayer(LayerNormLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, CohereConfig)
        qkv = super().qkv(config, source)
        if not config.head_norms:
            return qkv
        weights = head_norms(config, source, lambda kind, _: f"{kind}_norm.weight")
        return HeadLayerNorms(qkv, weights, config.rms_norm_eps)


class Cohere(LayerNormLlama):
    layer: Callable[..., Layer] = CohereLayer

    def __init__(self, config: Any, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.head.finish_with(lambda logits: logits.mul_(config.logit_scale))

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_cohere_config(CohereConfig, file, head_norms=file.flag("use_qk_norm"))


def read_cohere_config(
    kind: type[Kind],
    file: ConfigFile,
    windows: tuple[int | None, ...] | None = None,
    theta: float = THETA,
    rope: Rope | None = None,
    **facts: Any,
) -> Kind:
    """Return the config of a config.json with Cohere's fields. theta: the default. rope: None = read from Cohere's
    fields. The rest as in read_llama_config."""
    # Command R and R+ say 8192 in max_position_embeddings, and the length that they were trained for in this field.
    context = file.count("model_max_length", file.count("max_position_embeddings", 8192))
    bias = file.flag("attention_bias")
    return read_llama_config(
        kind,
        ConfigFile({**file.fields, "max_position_embeddings": context}),
        Defaults(8192, tie_word_embeddings=True),
        windows,
        eps=file.number("layer_norm_eps", 1e-5),
        rope=rope or read_rope(file, context, theta=theta, interleaved=True),
        qkv_bias=bias,
        output_bias=bias,
        norm_bias=False,
        parallel=True,
        two_norms=False,
        logit_scale=file.number("logit_scale", 0.0625),
        **facts,
    )
