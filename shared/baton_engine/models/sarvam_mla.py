"""Sarvam 105B (Sarvam AI, 2026): DeepSeek-V3's layers, with Ling's names in config.json."""

from typing import Any

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import rope_fields

from .deepseek_v3 import DeepseekV3
from .llama import LlamaConfig

_DEFAULTS = {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1}
# The values with which the published model is computed.
_GIVEN: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "moe_layer_freq": 1, "moe_router_enable_expert_bias": True, "score_function": "sigmoid",
}  # fmt: skip


class SarvamMla(DeepseekV3):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, value in _GIVEN.items():
            file.require_absent(name, value)
        file.require_absent("moe_shared_expert_intermediate_size", file.count("moe_intermediate_size"))
        rope = rope_fields(file)
        if (rope.get("rope_type") or rope.get("type")) == "deepseek_yarn":
            rope["rope_type"] = "yarn"
        own = {
            "q_lora_rank": file.fields.get("q_lora_rank"),
            "n_routed_experts": file.count("num_experts"),
            "n_shared_experts": file.integer("num_shared_experts", 1),
            "num_experts_per_tok": file.count("num_experts_per_tok"),
            "rope_scaling": rope,
            "rope_parameters": None,
        }
        return super().read_config(ConfigFile({**file.with_defaults(_DEFAULTS).fields, **own}))
