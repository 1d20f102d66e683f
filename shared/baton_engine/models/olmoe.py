"""OLMoE (Muennighoff et al., 2024): Llama with experts, and with norms across all heads of queries and keys."""

from collections.abc import Callable

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .olmo2 import NormedQkv
from .qwen2_moe import SparseQwenLayer
from .sparse_config import SparseConfig, read_experts_per_token


class OlmoeLayer(SparseQwenLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[torch.Tensor], torch.Tensor]:
        return NormedQkv(config, source, super().qkv(config, source))


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
