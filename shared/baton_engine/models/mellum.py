"""Mellum 2 (JetBrains, 2026): Qwen3's layers with experts, and windows with a rope of their own in some of them."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .qwen2_moe import SparseQwenLayer
from .sliding_windows import WithWindowRope, ropes_by_window
from .sparse_config import SparseConfig, read_experts_per_token, read_layers_without_experts

_CONTEXT = 131072


class MellumConfig(WithWindowRope, SparseConfig, frozen=True, kw_only=True):
    window_rope: Rope


class Mellum(Llama):
    layer = SparseQwenLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, context = file.count("num_hidden_layers"), file.count("max_position_embeddings", _CONTEXT)
        window, bias = file.count("sliding_window", 1024), file.flag("attention_bias")
        types = file.layer_types("layer_types", layers) or ["full_attention"] * layers
        # transformers writes the latter name.
        experts = file.count("num_experts", file.count("num_local_experts", 64))
        rope, window_rope = ropes_by_window(file, context, 500000.0, 10000.0)
        return read_llama_config(
            MellumConfig,
            file,
            Defaults(_CONTEXT, num_kv_heads=4, head_dim=128),
            tuple(window if kind == "sliding_attention" else None for kind in types),
            rope=rope,
            window_rope=window_rope,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size", 896),
            routing=Routing(read_experts_per_token(file, experts, 8), normalize=file.flag("norm_topk_prob", True)),
            dense_layers=read_layers_without_experts(file, layers, 0),
        )
