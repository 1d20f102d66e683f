"""Mistral 4 (Mistral AI, 2026): DeepSeek's layers with experts chosen by softmax scores, and queries that grow with
their position."""

from typing import Any

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import ExpertsMethod, JoinedForm
from baton_engine.layers.experts import load_joined_experts
from baton_engine.layers.rope import read_rope, rope_fields
from baton_engine.source import Source

from .deepseek_v2 import DeepseekLayer, read_deepseek_config
from .llama import Llama, LlamaConfig
from .ministral3 import read_growth
from .sparse_config import SparseConfig

_CONTEXT = 1048576
# Those of transformers' configuration class.
_DEFAULTS = {
    "max_position_embeddings": _CONTEXT, "n_routed_experts": 128, "n_shared_experts": 1, "q_lora_rank": 1024,
    "kv_lora_rank": 256, "qk_nope_head_dim": 64, "moe_intermediate_size": 2048,
}  # fmt: skip
_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


class Mistral4Layer(DeepseekLayer):
    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        form = JoinedForm(activation=config.activation)
        return load_joined_experts(source, config.num_experts, config.hidden_size, config.expert_size, form)


class Mistral4(Llama):
    layer = Mistral4Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        rope = rope_fields(file) or _ROPE
        key, rotated = file.count("qk_nope_head_dim", 64), file.count("qk_rope_head_dim", 64)
        partial = rope.get("partial_rotary_factor") or file.fields.get("partial_rotary_factor")
        if partial not in (None, rotated / (key + rotated)):
            raise ConfigError(f"partial_rotary_factor {partial!r} in config.json does not agree with qk_rope_head_dim")
        # The partial rotation of the rope parameters repeats the information of qk_rope_head_dim.
        fields: dict[str, Any] = {
            **file.fields, "partial_rotary_factor": None, "rope_scaling": None,
            "rope_parameters": {**rope, "partial_rotary_factor": None},
        }  # fmt: skip
        given = ConfigFile(fields)
        return read_deepseek_config(
            given, _DEFAULTS, chosen=4, interleaved=file.flag("rope_interleave", True),
            normalize=file.flag("norm_topk_prob", True), group_best=2,
            growth=read_growth(given, read_rope(given, file.count("max_position_embeddings", _CONTEXT))),
        )  # fmt: skip
