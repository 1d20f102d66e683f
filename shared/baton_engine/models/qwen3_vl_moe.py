"""The text part of Qwen3-VL with experts (Qwen Team, 2025), whose tensors hold all experts of a layer."""

from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import ExpertsMethod, JoinedForm
from baton_engine.layers.experts import load_joined_experts
from baton_engine.source import Source

from .llama import LlamaConfig
from .qwen2_moe import SparseQwenLayer
from .qwen3_moe import Qwen3Moe
from .sparse_config import SparseConfig


class _JoinedLayer(SparseQwenLayer):
    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        form = JoinedForm(activation=config.activation)
        return load_joined_experts(source, config.num_experts, config.hidden_size, config.expert_size, form)


class Qwen3VlMoe(Qwen3Moe):
    layer = _JoinedLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return super().read_config(file.with_defaults({"norm_topk_prob": True}))
