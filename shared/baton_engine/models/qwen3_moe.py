"""Qwen3-MoE (Yang et al., 2025): Qwen3 with experts."""

from baton_engine.config_file import ConfigFile
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .qwen2 import within_one_chunk
from .qwen2_moe import SparseQwenLayer
from .sparse_config import SparseConfig, read_dense_layers, read_experts_per_token


class Qwen3Moe(Llama):
    layer = SparseQwenLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = within_one_chunk(file)
        layers, bias = file.count("num_hidden_layers"), file.flag("attention_bias")
        window = file.count("sliding_window", 4096) if file.flag("use_sliding_window") else None
        # transformers has written either name.
        experts = file.count("num_experts", file.count("num_local_experts", 128))
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(32768, num_kv_heads=4),
            (window,) * layers,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size", 768),
            routing=Routing(read_experts_per_token(file, experts, 8), normalize=file.flag("norm_topk_prob")),
            dense_layers=read_dense_layers(file, layers),
        )
