"""The text part of Aria (Rhymes AI, 2024): Llama with experts, beside some that all tokens use."""

from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import ExpertsMethod, JoinedForm
from baton_engine.layers.experts import load_joined_experts
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .deepseek_experts import UncorrectedExpertsLayer
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sparse_config import SparseConfig


class AriaLayer(UncorrectedExpertsLayer):
    router = "router"

    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        form = JoinedForm("fc1.weight", "fc2.weight")
        return load_joined_experts(source, config.num_experts, config.hidden_size, config.expert_size, form)


class Aria(Llama):
    layer = AriaLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("mlp_bias", False)
        size, experts = file.count("intermediate_size", 4096), file.count("moe_num_experts", 8)
        bias = file.flag("attention_bias")
        file.require_absent("moe_intermediate_size", size)
        return read_llama_config(
            SparseConfig,
            ConfigFile({**file.fields, "intermediate_size": size}),
            Defaults(2048),
            qkv_bias=bias,
            output_bias=bias,
            num_experts=experts,
            expert_size=size,
            # The softmax of the chosen experts' logits alone.
            routing=Routing(file.at_most("moe_topk", experts, 2), normalize=True),
            shared_size=file.integer("moe_num_shared_experts", 2) * size,
        )
