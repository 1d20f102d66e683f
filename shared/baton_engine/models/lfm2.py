"""LFM2 (Liquid AI, 2025), with and without experts: most layers have a short convolution in place of attention."""

from collections.abc import Callable
from typing import Any, Self, TypeVar

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import ExpertNames
from baton_engine.layers.experts import ExpertMlp, Router, load_experts
from baton_engine.layers.short_conv import ShortConv
from baton_engine.shard import Place
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .heads_by_layer import WithHeadsByLayer
from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .sparse_config import SparseConfig, read_experts_per_token

_EXPERT_NAMES = ExpertNames(gate="w1", up="w3", down="w2")


class Convolutions(msgspec.Struct, frozen=True):
    """The convolutions of a model. layers: those that have one instead of attention. length: tokens of a filter. bias:
    of the projections, too."""

    layers: frozenset[int]
    length: int
    channels: int
    bias: bool


class WithConvolutions(WithHeadsByLayer):
    """A part of the config of a model with convolutions.

    The inputs of a convolution's last tokens are in the cache, as keys and values of attention with a window are: each
    key-value head has the same number of channels.
    """

    num_kv_heads: int
    convolutions: Convolutions

    @property
    def recent_tokens(self) -> int:
        return self.convolutions.length

    def of_layer(self, layer: int) -> Any:
        config: Any = self
        if layer not in self.convolutions.layers:
            return config
        return msgspec.structs.replace(config, head_dim=self.convolutions.channels // (2 * self.num_kv_heads))

    def part(self, ranks: Place) -> Self:
        if self.num_kv_heads % ranks.count:
            raise ConfigError(
                f"--tensor-parallel {ranks.count} does not divide the {self.num_kv_heads} key-value heads, which have "
                "the channels of convolutions"
            )
        part: Any = super().part(ranks)  # type: ignore[misc]
        fewer = msgspec.structs.replace(self.convolutions, channels=self.convolutions.channels // ranks.count)
        own: Self = msgspec.structs.replace(part, convolutions=fewer)
        return own


class Lfm2Config(WithConvolutions, LlamaConfig, frozen=True, kw_only=True):
    convolutions: Convolutions


class Lfm2MoeConfig(WithConvolutions, SparseConfig, frozen=True, kw_only=True):
    """corrected: the choice of experts adds a correction to their scores."""

    convolutions: Convolutions
    corrected: bool


def convolution(config: WithConvolutions, source: Source, layer: int) -> ShortConv:
    kind = config.convolutions
    return ShortConv(source, layer, kind.channels, kind.length, kind.bias)


def check_channels(config: WithConvolutions) -> None:
    """Raise ConfigError unless key-value heads can have the channels of convolutions."""
    channels, heads = config.convolutions.channels, config.num_kv_heads
    if channels % (2 * heads):
        raise ConfigError(
            f"hidden_size {channels} is not a multiple of twice the {heads} key-value heads, which have the channels "
            "of convolutions"
        )


class Lfm2Layer(LlamaLayer):
    blocks = (None, "feed_forward")
    norms = ("operator_norm", "ffn_norm")
    output = "out_proj"
    head_norms = ("q_layernorm", "k_layernorm")
    gates = ("w1", "w3")
    down = "w2"

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, WithConvolutions)
        if layer in config.convolutions.layers:
            return convolution(config, source.at("conv"), layer)
        return super().make_attention(config, source.at("self_attn"), layer, rotary)


class Lfm2MoeLayer(Lfm2Layer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, Lfm2MoeConfig)
        if layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        source, count, hidden = self.block(source, 1), config.num_experts, config.hidden_size
        correction = source.take("expert_bias", (count,), dtype=torch.float32) if config.corrected else None
        router = Router(source.at("gate"), config.routing, count, hidden, correction=correction)
        names = _EXPERT_NAMES.gated(config.activation)
        held = load_experts(source.at("experts"), names, count, hidden, config.expert_size)
        return ExpertMlp(router, held, source.ranks)


class Lfm2(Llama):
    layer = Lfm2Layer
    final_norm = "embedding_norm"

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return _read_config(Lfm2Config, file, _mlp_units(file))


class Lfm2Moe(Lfm2):
    layer = Lfm2MoeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        experts, layers = file.count("num_experts", 32), file.count("num_hidden_layers")
        return _read_config(
            Lfm2MoeConfig,
            file,
            file.count("intermediate_size", 7168),
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size", 1792),
            routing=Routing(
                read_experts_per_token(file, experts, 4),
                sigmoid=True,
                normalize=file.flag("norm_topk_prob", True),
                added=1e-6,
                scale=file.number("routed_scaling_factor", 1.0),
            ),
            dense_layers=frozenset(range(min(file.integer("num_dense_layers", 2), layers))),
            corrected=file.flag("use_expert_bias", True),
        )


Kind = TypeVar("Kind", Lfm2Config, Lfm2MoeConfig)


def _read_config(kind: type[Kind], file: ConfigFile, units: int, **facts: Any) -> Kind:
    """Return the config of a config.json with LFM2's fields. units: hidden units of an MLP."""
    layers, length = file.count("num_hidden_layers"), file.count("conv_L_cache", 3)
    convolving = _convolving_layers(file, layers)
    tied = file.flag("tie_embedding", file.flag("tie_word_embeddings", True))
    config = read_llama_config(
        kind,
        ConfigFile({**file.fields, "intermediate_size": units, "tie_word_embeddings": tied}),
        Defaults(128_000, num_kv_heads=8, rope_theta=1e6),
        tuple(length if layer in convolving else None for layer in range(layers)),
        eps=file.number("norm_eps", 1e-5),
        qk_norm=True,
        convolutions=Convolutions(convolving, length, file.count("hidden_size"), file.flag("conv_bias")),
        **facts,
    )
    check_channels(config)
    return config


def _convolving_layers(file: ConfigFile, layers: int) -> frozenset[int]:
    types = file.layer_types("layer_types", layers, ("full_attention", "conv"))
    if types is not None:
        return frozenset(layer for layer, kind in enumerate(types) if kind == "conv")
    if file.fields.get("full_attn_idxs") is None:
        return frozenset()
    return frozenset(range(layers)) - set(file.integers("full_attn_idxs"))


def _mlp_units(file: ConfigFile) -> int:
    units = file.count("block_ff_dim", file.count("intermediate_size", 12_288))
    if not file.flag("block_auto_adjust_ff_dim", True):
        return units
    units, factor = int(2 * units / 3), file.fields.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return units
    units, multiple = int(file.number("block_ffn_dim_multiplier", 1.0) * units), file.count("block_multiple_of", 256)
    return -(-units // multiple) * multiple
