"""GLM-4.5 and GLM-4.5-Air (GLM-4.5 Team, 2025): experts chosen by sigmoids, a shared expert, half-rotated heads."""

from collections.abc import Callable

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source

from .deepseek_experts import make_experts
from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .sparse_config import SparseConfig, read_grouped_routing

_CONTEXT = 131072


class Glm4MoeLayer(LlamaLayer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        assert isinstance(config, SparseConfig)
        if layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        return make_experts(config, source.at("mlp"), corrected=True)


class Glm4Moe(Llama):
    layer = Glm4MoeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, experts = file.count("num_hidden_layers"), file.count("n_routed_experts", 128)
        size, shared = file.count("moe_intermediate_size", 1408), file.count("n_shared_experts", 1)
        dense = file.integer("first_k_dense_replace", 1)
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(_CONTEXT, num_kv_heads=8, rms_norm_eps=1e-5),
            rope=read_rope(file, file.count("max_position_embeddings", _CONTEXT), partial=0.5),
            qkv_bias=file.flag("attention_bias"),
            qk_norm=file.flag("use_qk_norm"),
            num_experts=experts,
            expert_size=size,
            routing=read_grouped_routing(
                file, experts, 8, sigmoid=True, normalize=file.flag("norm_topk_prob", True), group_best=2
            ),
            shared_size=shared * size,
            dense_layers=frozenset(range(min(dense, layers))),
        )
