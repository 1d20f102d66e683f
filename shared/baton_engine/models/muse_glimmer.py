"""The text part of Muse Glimmer (Meta, 2026): gates of attention, norms around each block and of embeddings, and
rotation in three of four layers, which have a window."""

from typing import Any

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.norm import RmsNorm, UnitNorm
from baton_engine.layers.rope import Rope
from baton_engine.source import Source

from .gated_layer import GatedLayer
from .granite_swa import read_thetas
from .llama import Defaults, Kind, Llama, LlamaConfig, read_llama_config
from .normed_around import NormedAround

# Those of transformers' configuration class.
_DEFAULTS = {"vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
             "num_attention_heads": 32}  # fmt: skip


class MuseFields:
    """A part of the configs of Muse Glimmer and Muse Spark.

    rotated: the layers that rotate. post_norm_eps: of norms after blocks. multiplier, softcap: of logits, which become
    softcap * tanh(multiplier * logits / softcap).
    """

    rope: Rope
    rotated: frozenset[int]
    post_norm_eps: float
    multiplier: float
    softcap: float

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if layer in self.rotated else None

    def fingerprint_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = super().fingerprint_facts()  # type: ignore[misc]
        return {**facts, "rotated": sorted(self.rotated), "post_norm_eps": self.post_norm_eps}


class MuseGlimmerConfig(MuseFields, LlamaConfig, frozen=True, kw_only=True):
    rotated: frozenset[int]
    post_norm_eps: float
    multiplier: float
    softcap: float


class MuseLayer(GatedLayer):
    norms = ("input_layernorm", "pre_feedforward_layernorm")

    def qk_norms(self, config: LlamaConfig, source: Source) -> tuple[RmsNorm, RmsNorm]:
        norm = UnitNorm(source, config.head_dim, config.rms_norm_eps)
        return norm, norm


class MuseGlimmerLayer(NormedAround, MuseLayer):
    post_norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def post_eps(self, config: LlamaConfig) -> float:
        assert isinstance(config, MuseFields)
        return config.post_norm_eps


class MuseGlimmer(Llama):
    layer: type[MuseLayer] = MuseGlimmerLayer

    def __init__(self, config: LlamaConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        assert isinstance(config, MuseFields)
        self.embedding_norm = UnitNorm(source, config.hidden_size, config.rms_norm_eps)
        cap, factor = config.softcap, config.multiplier / config.softcap
        self.head.finish_with(lambda logits: logits.mul_(factor).tanh_().mul_(cap))

    def make_norm(self, config: LlamaConfig, source: Source) -> RmsNorm:
        return RmsNorm(source.at("norm"), config.hidden_size, config.rms_norm_eps)

    def embed(self, ctx: Context) -> torch.Tensor:
        return self.embedding_norm(super().embed(ctx))

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_muse_config(
            MuseGlimmerConfig,
            ConfigFile({**file.with_defaults(_DEFAULTS).fields, "hidden_act": file.fields.get("hidden_activation")}),
            Defaults(131072, num_kv_heads=2, head_dim=128, rms_norm_eps=1e-5),
            query_scale=3.87,
            multiplier=0.19611613513818404,
        )


def read_muse_config(
    kind: type[Kind], file: ConfigFile, defaults: Defaults, *, query_scale: float, multiplier: float, **facts: Any
) -> Kind:
    """Return the config of a config.json with the fields of Muse Glimmer.

    query_scale: the default of the factor of queries. multiplier: that of logits. kind, defaults, facts: as in
    read_llama_config.
    """
    layers, bias = file.count("num_hidden_layers"), file.flag("attention_bias")
    # Every fourth layer sees all tokens and rotates none, counted from the last layer on.
    whole = frozenset(range((layers - 1) % 4, layers, 4))
    types = file.layer_types("layer_types", layers) or [
        "full_attention" if layer in whole else "sliding_attention" for layer in range(layers)
    ]
    window = file.count("sliding_window", 2048)
    dim, cap = file.count("head_dim", defaults.head_dim), file.number("final_logit_softcapping", 20.0)
    if cap <= 0:
        raise ConfigError(f"final_logit_softcapping in config.json is {cap}; it must be above 0")
    config = read_llama_config(
        kind,
        file,
        defaults,
        tuple(window if kind == "sliding_attention" else None for kind in types),
        scale=file.number("qk_scale_factor", query_scale) * dim**-0.5,
        norm_offset=1.0,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        rotated=frozenset(range(layers)) - whole,
        post_norm_eps=file.number("post_norm_eps", 1e-8),
        multiplier=file.number("output_multiplier", multiplier),
        softcap=cap,
        **facts,
    )
    thetas = read_thetas(file, layers)
    if not set(thetas) <= {0.0, config.rope.theta}:
        # transformers rotates all layers with the theta of rope_parameters.
        raise ConfigError(f"layer_rope_theta in config.json must be 0 or rope_theta, which is {config.rope.theta}")
    if not thetas:
        return config
    return msgspec.structs.replace(config, rotated=frozenset(each for each in range(layers) if thetas[each]))
