"""The text part of Muse Spark (Meta, 2026): Muse Glimmer with gates of residuals, a norm of what each head returns, and
experts of fewer dimensions with a norm of each result."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import JoinedForm
from baton_engine.inputs import OutputRows
from baton_engine.layers.experts import Router, load_joined_experts
from baton_engine.layers.gated_attention import NormedGatedAttention
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import RmsNorm, ScaledInputNorm, UnitNorm
from baton_engine.layers.normed_experts import NormedExperts
from baton_engine.layers.residual_gate import ResidualGate
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import Defaults, LlamaConfig
from .muse_glimmer import MuseFields, MuseGlimmer, MuseLayer, read_muse_config
from .sparse_config import SparseConfig, read_experts_per_token, read_layers_without_experts

# Those of transformers' configuration class.
_DEFAULTS = {"vocab_size": 202048, "hidden_size": 8192, "intermediate_size": 16384, "num_hidden_layers": 62,
             "num_attention_heads": 128}  # fmt: skip


class MuseSparkConfig(MuseFields, SparseConfig, frozen=True, kw_only=True):
    """expert_dim: elements of the inputs and results of experts. temperature: as in ResidualGate."""

    rotated: frozenset[int]
    post_norm_eps: float
    multiplier: float
    softcap: float
    expert_dim: int
    temperature: float

    def _weights(self, experts: float) -> float:
        # Experts have rows of expert_dim elements. Two projections lead from hidden states to these and back.
        hidden, inner, sparse = self.hidden_size, self.expert_dim, 1 - len(self.dense_layers) / self.num_layers
        narrower = 3 * (hidden - inner) * experts * self.expert_size
        return super()._weights(experts) + sparse * (2 * hidden * inner - narrower)


class MuseSparkLayer(MuseLayer):
    attention_class = NormedGatedAttention

    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        super().__init__(config, source, layer, rotary)
        assert isinstance(config, MuseSparkConfig)
        hidden, eps, blocks = config.hidden_size, config.post_norm_eps, ("post_attention", "post_feedforward")
        self.after_attention = UnitNorm(source, hidden, eps)
        self.after_mlp = ScaledInputNorm(source.at("post_feedforward_layernorm"), hidden, eps, config.norm_offset)
        self.attention_gate, self.mlp_gate = (
            ResidualGate(source.at(f"{block}_residual_gate"), hidden, config.temperature) for block in blocks
        )

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, MuseSparkConfig)
        if layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        source, count, hidden, inner = source.at("mlp"), config.num_experts, config.hidden_size, config.expert_dim
        correction = source.take("gate.e_score_correction_bias", (count,), dtype=torch.float32)
        router = Router(
            source.at("gate"), config.routing, count, hidden, correction=correction, factor=config.multiplier
        )
        experts, offset = source.at("experts"), config.norm_offset
        return NormedExperts(
            router,
            Linear(source, ["pre_expert_proj"], [inner], hidden),
            RmsNorm(source.at("pre_expert_norm"), inner, config.rms_norm_eps, offset),
            load_joined_experts(experts, count, inner, config.expert_size, JoinedForm(activation=config.activation)),
            ScaledInputNorm(experts.at("post_expert_norm"), inner, config.post_norm_eps, offset),
            Linear(source, ["post_expert_proj"], [hidden], inner),
            source.ranks,
        )

    def __call__(self, x: OutputRows, residual: torch.Tensor | None, ctx: Context) -> tuple[Any, Any]:
        """As LlamaLayer does. Nothing is left for the next norm to add."""
        normed, total = self.input_norm.add(x, residual)
        attended = self.after_attention(self.attention(normed, ctx))
        normed, total = self.post_attention_norm.add(self.attention_gate(total, attended), None)
        output = self.after_mlp(self.mlp(normed))
        return self.mlp_gate(total, output), None


class MuseSpark(MuseGlimmer):
    layer = MuseSparkLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        layers, experts = file.count("num_hidden_layers"), file.count("num_local_experts", 256)
        temperature = file.number("residual_gate_temperature", 0.3)
        if temperature <= 0:
            raise ConfigError(f"residual_gate_temperature in config.json is {temperature}; it must be above 0")
        return read_muse_config(
            MuseSparkConfig,
            file,
            Defaults(1048576, num_kv_heads=16, head_dim=64, rms_norm_eps=1e-5, rope_theta=5e5),
            query_scale=5.4730064863875,
            multiplier=0.1767766952966369,
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size", 4096),
            expert_dim=file.count("moe_hidden_size", 4096),
            routing=Routing(
                read_experts_per_token(file, experts, 8), sigmoid=True, normalize=True,
                scale=file.number("routed_scaling_factor", 1.0),
            ),
            dense_layers=read_layers_without_experts(file, layers, 0),
            temperature=temperature,
        )  # fmt: skip
