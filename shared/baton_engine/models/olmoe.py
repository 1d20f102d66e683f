"""OLMoE (Muennighoff et al., 2024): Llama with experts, and with norms across all heads of queries and keys."""

from collections.abc import Callable

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.linear import Linear
from baton_engine.shard import Heads
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .olmo2 import NormedQkv
from .qwen2_moe import SparseQwenLayer
from .sparse_config import SparseConfig, read_experts_per_token


class OlmoeLayer(SparseQwenLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[torch.Tensor], torch.Tensor]:
        q, kv, eps = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.rms_norm_eps
        names, heads = ["q_proj", "k_proj", "v_proj"], Heads(source.ranks, config.head_dim)
        linear = Linear(source, names, [q, kv, kv], config.hidden_size, bias=config.qkv_bias, shard=heads)
        return NormedQkv(source, linear, (q, kv), eps, heads)


class Olmoe(Llama):
    layer = OlmoeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("clip_qkv")
        bias = file.flag("attention_bias")
        experts = file.count("num_experts", 64)
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(4096, rms_norm_eps=1e-5),
            qkv_bias=bias,
            output_bias=bias,
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            routing=Routing(read_experts_per_token(file, experts, 8), normalize=file.flag("norm_topk_prob")),
        )
