"""DeepSeek-V3 and R1 (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024), and Kimi-K2 (Kimi Team, 2025): DeepSeek-V2
with experts chosen by sigmoids and a correction that balances their load."""

from baton_engine.config_file import ConfigFile

from .deepseek_v2 import DeepseekLayer, read_deepseek_config
from .llama import Llama, LlamaConfig

# Those of transformers' configuration class.
DEFAULTS = {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}


class DeepseekV3(Llama):
    layer = DeepseekLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.choice("scoring_func", "sigmoid", ("sigmoid",))
        file.choice("topk_method", "noaux_tc", ("noaux_tc",))
        return read_deepseek_config(
            file, DEFAULTS, chosen=8, interleaved=file.flag("rope_interleave", True), corrected=True, sigmoid=True,
            normalize=file.flag("norm_topk_prob", True), group_best=2,
        )  # fmt: skip
