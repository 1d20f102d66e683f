"""dots.llm1 (rednote-hilab, 2025): DeepSeek's choice of experts, with norms of each query and key head."""

from baton_engine.config_file import ConfigFile

from .deepseek_experts import DeepseekExpertsLayer
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sliding_windows import windows_from
from .sparse_config import SparseConfig, read_grouped_routing, read_layers_without_experts


class Dots1(Llama):
    layer = DeepseekExpertsLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, experts = file.count("num_hidden_layers"), file.count("n_routed_experts")
        size, bias = file.count("moe_intermediate_size", 1408), file.flag("attention_bias")
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(2048, num_kv_heads=32),
            windows_from(file, layers, 62),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            num_experts=experts,
            expert_size=size,
            routing=read_grouped_routing(
                file, experts, file.count("num_experts_per_tok"), sigmoid=True, normalize=file.flag("norm_topk_prob"),
                group_best=2,
            ),
            shared_size=file.integer("n_shared_experts", 0) * size,
            dense_layers=read_layers_without_experts(file, layers, 0),
        )  # fmt: skip
