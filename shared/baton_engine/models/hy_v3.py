"""Hy3 (Tencent, 2026): experts chosen by sigmoids beside some that all tokens use, with norms of each head."""

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .deepseek_experts import DeepseekExpertsLayer
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sparse_config import SparseConfig, read_experts_per_token, read_layers_without_experts

_CONTEXT = 131072
# The values with which transformers computes every model of the family.
_GIVEN = {"mlp_bias": False, "qk_norm": True, "route_norm": True, "moe_router_use_sigmoid": True}


class HyV3Layer(DeepseekExpertsLayer):
    router, shared = "router.gate", "shared_mlp"

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return source.take("expert_bias", (config.num_experts,), dtype=torch.float32)


class HyV3(Llama):
    layer = HyV3Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, value in _GIVEN.items():
            file.require_absent(name, value)
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", 192)
        bias, size = file.flag("attention_bias"), file.count("moe_intermediate_size", 1536)
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(_CONTEXT, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5),
            rope=read_rope(file, file.count("max_position_embeddings", _CONTEXT), theta=11158840.0),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            num_experts=experts,
            expert_size=size,
            routing=Routing(
                read_experts_per_token(file, experts, 8), sigmoid=True, normalize=True,
                scale=file.number("router_scaling_factor", 2.826),
            ),
            shared_size=file.count("num_shared_experts", 1) * size,
            dense_layers=read_layers_without_experts(file, layers, 1),
        )  # fmt: skip
