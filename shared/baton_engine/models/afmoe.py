"""Trinity (Arcee AI, 2025): gates of attention, norms around each block, experts chosen by sigmoids, and rotation where
a layer has a window."""

from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .deepseek_experts import DeepseekExpertsLayer
from .exaone4 import RotatesInWindows
from .gated_layer import GatedLayer
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .normed_around import NormedAround
from .sliding_windows import windows_in_turn
from .sparse_config import SparseConfig, read_experts_per_token

# The values with which transformers computes every model of the family.
_GIVEN = {"n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1, "route_norm": True,
          "score_func": "sigmoid"}  # fmt: skip


class AfmoeConfig(RotatesInWindows, SparseConfig, frozen=True, kw_only=True):
    """multiplier: of embeddings."""

    multiplier: float

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "multiplier": self.multiplier}


class AfmoeLayer(NormedAround, GatedLayer, DeepseekExpertsLayer):
    norms = ("input_layernorm", "pre_mlp_layernorm")
    post_norms = ("post_attention_layernorm", "post_mlp_layernorm")
    router = "router.gate"

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return source.take("expert_bias", (config.num_experts,), dtype=torch.float32)


class Afmoe(Llama):
    layer = AfmoeLayer

    def __init__(self, config: AfmoeConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.multiplier = config.multiplier

    def embed(self, ctx: Context) -> torch.Tensor:
        return super().embed(ctx).mul_(self.multiplier)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, value in _GIVEN.items():
            file.require_absent(name, value)
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", 64)
        bias, size = file.flag("attention_bias"), file.count("moe_intermediate_size", 1408)
        windows = {
            "sliding_window": file.count("sliding_window", 1024),
            "sliding_window_pattern": file.count("global_attn_every_n_layers", 4),
        }
        return read_llama_config(
            AfmoeConfig,
            file,
            Defaults(16384, head_dim=128, rms_norm_eps=1e-5),
            windows_in_turn(ConfigFile({**file.fields, **windows}), layers, 4),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            num_experts=experts,
            expert_size=size,
            routing=Routing(
                read_experts_per_token(file, experts, 6), sigmoid=True, normalize=True,
                scale=file.number("route_scale", 1.0),
            ),
            shared_size=file.integer("num_shared_experts", 2) * size,
            dense_layers=frozenset(range(min(file.integer("num_dense_layers", 1), layers))),
            multiplier=file.count("hidden_size") ** 0.5 if file.flag("mup_enabled") else 1.0,
        )  # fmt: skip
