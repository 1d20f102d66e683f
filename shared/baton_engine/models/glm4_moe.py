"""GLM-4.5 and GLM-4.5-Air (GLM-4.5 Team, 2025): experts chosen by sigmoids, a shared expert, half-rotated heads."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope

from .deepseek_experts import DeepseekExpertsLayer
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sparse_config import SparseConfig, read_grouped_routing, read_layers_without_experts

_CONTEXT = 131072


class Glm4Moe(Llama):
    layer = DeepseekExpertsLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, experts = file.count("num_hidden_layers"), file.count("n_routed_experts", 128)
        size, shared = file.count("moe_intermediate_size", 1408), file.count("n_shared_experts", 1)
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
            dense_layers=read_layers_without_experts(file, layers, 1),
        )
