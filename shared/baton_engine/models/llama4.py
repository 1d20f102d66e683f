"""Llama 4 (Meta, 2025): experts whose inputs the router scales beside one that all tokens use, chunks in most layers,
no rotation in the others."""

from collections.abc import Callable
from typing import Any, Self

import msgspec
import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import JoinedForm
from baton_engine.layers.attention import Attention
from baton_engine.layers.experts import Router, ScaledInputMlp, WithSharedExpert, load_joined_experts
from baton_engine.layers.norm import RmsNorm, UnitNorm
from baton_engine.layers.position_scale import PositionScaledAttention, stepped_scales
from baton_engine.layers.rope import Rope, read_rope, read_rope_before_norms
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .qwen2_moe import shared_expert
from .smollm3 import read_rotating
from .sparse_config import SparseConfig, read_experts_per_token

_CONTEXT = 131072
_KINDS = ("full_attention", "chunked_attention")


class Llama4Config(SparseConfig, frozen=True, kw_only=True):
    """rotating: whether each layer rotates queries and keys. growth, trained: of the queries of the other layers, as in
    stepped_scales; growth 0 = none. positions: the most of a sequence. qk_norm: of rotating layers alone."""

    rotating: tuple[bool, ...]
    growth: float
    trained: int
    positions: int

    @property
    def default_model_len(self) -> int:
        # Scout was made for 10 million positions, for which hardly anybody has the memory.
        return min(self.max_position_embeddings, _CONTEXT)

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "rotating": list(self.rotating)}

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if self.rotating[layer] else None

    def limited(self, max_positions: int) -> Self:
        return msgspec.structs.replace(super().limited(max_positions), positions=max_positions)


class Llama4Layer(LlamaLayer):
    blocks = ("self_attn", "feed_forward")

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, Llama4Config)
        if rotary is not None or not config.growth:
            norms = self.qk_norms(config, source) if rotary is not None and config.qk_norm else None
            output = self.attended(config, source)
            return Attention(config, layer, source, self.qkv(config, source), output, rotary, norms)
        scales = stepped_scales(config.trained, config.growth, config.positions, source.dtype, source.device, first=1)
        output = self.attended(config, source)
        return PositionScaledAttention(config, layer, source, self.qkv(config, source), output, None, scales)

    def qk_norms(self, config: LlamaConfig, source: Source) -> tuple[RmsNorm, RmsNorm]:
        # A rotation keeps the root mean square of a head, so norms without weights may come before it.
        norm = UnitNorm(source, config.head_dim, config.rms_norm_eps)
        return norm, norm

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, Llama4Config)
        if layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        source, experts, hidden = self.block(source, 1), config.num_experts, config.hidden_size
        router = Router(source.at("router"), config.routing, experts, hidden)
        form = JoinedForm(activation=config.activation)
        held = load_joined_experts(source.at("experts"), experts, hidden, config.expert_size, form)
        shared = shared_expert(source.at("shared_expert"), config.shared_size, hidden, config.activation)
        return WithSharedExpert(ScaledInputMlp(router, held, source.ranks), shared, source.ranks)


class Llama4(Llama):
    layer = Llama4Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, experts = file.count("num_hidden_layers"), file.count("num_local_experts", 16)
        size, context = file.count("intermediate_size", 8192), file.count("max_position_embeddings", _CONTEXT)
        # An empty list stands for the default, too.
        given = {**file.fields, "no_rope_layers": file.fields.get("no_rope_layers") or None}
        rotating = read_rotating(ConfigFile(given), layers)
        kinds = file.layer_types("layer_types", layers, _KINDS)
        chunked = rotating if kinds is None else tuple(kind == "chunked_attention" for kind in kinds)
        qk_norm = file.flag("use_qk_norm", True)
        read = read_rope_before_norms if qk_norm else read_rope
        chunk, bias = file.count("attention_chunk_size", 8192), file.flag("attention_bias")
        config = read_llama_config(
            Llama4Config,
            ConfigFile({**file.fields, "intermediate_size": file.count("intermediate_size_mlp", 16384)}),
            Defaults(_CONTEXT, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5),
            tuple(chunk if each else None for each in chunked),
            rope=read(file, context, theta=500000.0, interleaved=True),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=qk_norm,
            num_experts=experts,
            expert_size=size,
            routing=Routing(read_experts_per_token(file, experts, 1), sigmoid=True),
            shared_size=size,
            dense_layers=_dense_layers(file, layers),
            rotating=rotating,
            growth=file.number("attn_scale", 0.1) if file.fields.get("attn_temperature_tuning", True) else 0.0,
            trained=file.count("floor_scale", 8192),
            positions=context,
        )
        specs = tuple(msgspec.structs.replace(spec, chunked=spec.window is not None) for spec in config.attention)
        return msgspec.structs.replace(config, attention=specs)


def _dense_layers(file: ConfigFile, layers: int) -> frozenset[int]:
    """Return the layers without experts: those that moe_layers does not name. Without that field, every
    interleave_moe_layer_step-th layer has experts."""
    step = file.count("interleave_moe_layer_step", 1)
    given = file.integers("moe_layers") if file.fields.get("moe_layers") is not None else range(step - 1, layers, step)
    return frozenset(range(layers)) - frozenset(given)
