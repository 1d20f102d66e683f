"""GLM-4.7-Flash (GLM Team, 2026): DeepSeek-V3's layers."""

from baton_engine.config_file import ConfigFile

from .deepseek_v2 import read_deepseek_config
from .deepseek_v3 import DeepseekV3
from .llama import LlamaConfig
from .sparse_config import read_layers_without_experts

# Those of transformers' configuration class.
_DEFAULTS = {
    "max_position_embeddings": 202752,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "routed_scaling_factor": 1.8,
    "moe_intermediate_size": 1536,
    "rms_norm_eps": 1e-5,
}


class Glm4MoeLite(DeepseekV3):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        dense = read_layers_without_experts(file, file.count("num_hidden_layers"), 1)
        return read_deepseek_config(
            file, _DEFAULTS, chosen=4, dense_layers=dense, interleaved=file.flag("rope_interleave", True),
            corrected=True, sigmoid=True, normalize=file.flag("norm_topk_prob", True), group_best=2,
        )  # fmt: skip
