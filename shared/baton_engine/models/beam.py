"""Beam (Reflection, 2026): gates of attention, norms around each block whose results count less the deeper it is,
experts chosen by sigmoids, and rotation where a layer has a window."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.gated_attention import GatedAttention
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rope import parse_layer_rope
from baton_engine.layers.scaled_gated_attention import ScaledGatedAttention
from baton_engine.shard import Heads, head_part
from baton_engine.source import Source

from .deepseek_experts import DeepseekExpertsLayer
from .exaone4 import RotatesInWindows
from .gemma3 import read_softcap, set_softcap
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .normed_around import NormedAround
from .sliding_windows import windows_in_turn
from .sparse_config import SparseConfig, read_grouped_routing, read_layers_without_experts

_CONTEXT = 8192
# Queries of layers without rotation grow with the tenth root of their distance from this position before the first.
_GROWTH, _TRAINED = 0.1, 2048


class BeamConfig(RotatesInWindows, SparseConfig, frozen=True, kw_only=True):
    """softcap: of logits; 0 = none."""

    softcap: float


class BeamLayer(NormedAround, DeepseekExpertsLayer):
    """A layer with norms around its blocks.

    The published code adds block number k, counted from 2, as x = x * sqrt((k - 1) / k) + output / sqrt(k). This layer
    has sqrt(k) * x in place of x, which is the plain sum of all outputs. The norms after it remove the factor if their
    epsilons are multiplied by its square.
    """

    norms = ("input_layernorm", "pre_feedforward_layernorm")
    post_norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        super().__init__(config, source, layer, rotary)
        hidden, eps, blocks = config.hidden_size, config.rms_norm_eps, 2 * layer + 1
        first, second = map(source.at, self.norms)
        self.input_norm = RmsNorm(first, hidden, eps * blocks).before(self.attention)
        self.post_attention_norm = RmsNorm(second, hidden, eps * (blocks + 1)).before(self.mlp)

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        heads, dim, own = config.num_heads, config.head_dim, head_part(config.num_heads, source.ranks)
        output, norms = self.attended(config, source), self.qk_norms(config, source)
        gate = Linear(source, ["gate_proj"], [heads * dim], config.hidden_size, shard=Heads(source.ranks, dim))
        bias = source.take("gate_bias", (heads,), (own,)).repeat_interleave(dim)
        parts = (
            config, layer, source, self.qkv(config, source), gate, output, lambda gates: (gates + bias).sigmoid_(),
            rotary, norms,
        )  # fmt: skip
        if rotary is not None:
            return GatedAttention(*parts)
        return ScaledGatedAttention(*parts, scales=query_scales(config.max_position_embeddings, source.device))


class Beam(Llama):
    layer = BeamLayer

    def __init__(self, config: BeamConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        set_softcap(self.head, config.softcap)

    def make_norm(self, config: LlamaConfig, source: Source) -> RmsNorm:
        eps = config.rms_norm_eps * (2 * config.num_layers + 1)
        return RmsNorm(source.at(self.final_norm), config.hidden_size, eps)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, experts = file.count("num_hidden_layers", 52), file.count("num_experts", 256)
        context = file.count("max_position_embeddings", _CONTEXT)
        file = file.with_defaults({"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5})
        kinds = file.layer_types("layer_types", layers)
        if kinds is None:
            # The last layer sees all tokens, too.
            kinds = [*("full_attention" if (at + 1) % 6 == 0 else "sliding_attention" for at in range(layers - 1))]
            kinds.append("full_attention")
        ropes = file.fields.get("rope_parameters") or {"sliding_attention": {}, "full_attention": None}
        window = ropes.get("sliding_attention")
        if window is None or ropes.get("full_attention") is not None:
            raise ConfigError(
                f"rope_parameters in config.json is {ropes!r}; Baton serves sliding_attention with and full_attention "
                f"without a rotation for {file.architecture}"
            )
        size, bias = file.count("moe_intermediate_size", 2560), file.flag("attention_bias")
        given = {"layer_types": kinds, "sliding_window": file.count("sliding_window", 512)}
        return read_llama_config(
            BeamConfig,
            file,
            Defaults(_CONTEXT, num_kv_heads=8, head_dim=128),
            windows_in_turn(ConfigFile({**file.fields, **given}), layers, 6),
            rope=parse_layer_rope(window, 10000.0, context, file),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            num_experts=experts,
            expert_size=size,
            routing=read_grouped_routing(
                file, experts, 8, sigmoid=True, group_best=2, normalize=file.flag("norm_topk_prob", True)
            ),
            dense_layers=read_layers_without_experts(file, layers, 3),
            softcap=read_softcap(file, "final_logit_softcapping", 30.0),
        )


@cache
def query_scales(max_positions: int, device: torch.device) -> torch.Tensor:
    """Return [max_positions] factors of the queries of layers without rotation."""
    seen = torch.arange(1, max_positions + 1, dtype=torch.float32, device=device)
    return torch.exp(_GROWTH * torch.log1p(seen / _TRAINED))
