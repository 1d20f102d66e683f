"""The text part of DeepSeek-OCR 2 (DeepSeek-AI, 2026): Llama's attention, and the experts of DeepSeek-V2."""

from baton_engine.config_file import ConfigFile

from .deepseek_experts import UncorrectedExpertsLayer
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sparse_config import SparseConfig, read_grouped_routing, read_layers_without_experts


class DeepseekOcr2(Llama):
    layer = UncorrectedExpertsLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("mlp_bias", False)
        file.require_absent("norm_topk_prob", False)
        file.choice("scoring_func", "softmax", ("softmax",))
        if file.choice("topk_method", "greedy", ("greedy", "group_limited_greedy")) == "greedy":
            file = ConfigFile({**file.fields, "n_group": 1, "topk_group": 1})
        # transformers has no other heads for any model of the family.
        dim = file.count("hidden_size") // file.count("num_attention_heads")
        file.require_absent("head_dim", dim)
        experts, size = file.count("n_routed_experts", 64), file.count("moe_intermediate_size", 1407)
        bias = file.flag("attention_bias")
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(2048),
            qkv_bias=bias,
            output_bias=bias,
            num_experts=experts,
            expert_size=size,
            routing=read_grouped_routing(file, experts, file.count("num_experts_per_tok")),
            shared_size=file.integer("n_shared_experts", 2) * size,
            dense_layers=read_layers_without_experts(file, file.count("num_hidden_layers"), 0),
        )
