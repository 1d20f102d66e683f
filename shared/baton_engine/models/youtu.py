"""Youtu-LLM (Tencent, 2025): DeepSeek-V3's attention, without experts."""

from typing import Any

from baton_engine.config_file import ConfigFile

from .deepseek_v2 import DeepseekConfig, read_deepseek_config
from .deepseek_v3 import DeepseekV3
from .llama import LlamaConfig

# Those of transformers' configuration class.
_DEFAULTS = {"max_position_embeddings": 131072, "q_lora_rank": 1536, "tie_word_embeddings": True}
_NO_EXPERTS = {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 0}


class Youtu(DeepseekV3):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_dense_config(file, _DEFAULTS, interleaved=file.flag("rope_interleave", True))


def read_dense_config(file: ConfigFile, defaults: dict[str, Any], *, interleaved: bool) -> DeepseekConfig:
    """Return the config of a model with DeepSeek's attention and no experts. defaults, interleaved: as in
    read_deepseek_config."""
    # The config has no field for experts, but that of DeepSeek's layers needs some.
    fields = {**file.fields, **_NO_EXPERTS, "moe_intermediate_size": file.count("intermediate_size")}
    dense = frozenset(range(file.count("num_hidden_layers")))
    return read_deepseek_config(ConfigFile(fields), defaults, chosen=1, dense_layers=dense, interleaved=interleaved)
