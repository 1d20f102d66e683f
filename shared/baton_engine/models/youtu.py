"""Youtu-LLM (Tencent, 2025): DeepSeek-V3's attention, without experts."""

from baton_engine.config_file import ConfigFile

from .deepseek_v2 import read_deepseek_config
from .deepseek_v3 import DeepseekV3
from .llama import LlamaConfig

# Those of transformers' configuration class.
_DEFAULTS = {"max_position_embeddings": 131072, "q_lora_rank": 1536, "tie_word_embeddings": True}
_NO_EXPERTS = {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 0}


class Youtu(DeepseekV3):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # The config has no field for experts, but that of DeepSeek's layers needs some.
        fields = {**file.fields, **_NO_EXPERTS, "moe_intermediate_size": file.count("intermediate_size")}
        return read_deepseek_config(
            ConfigFile(fields), _DEFAULTS, chosen=1, dense_layers=frozenset(range(file.count("num_hidden_layers"))),
            interleaved=file.flag("rope_interleave", True),
        )  # fmt: skip
