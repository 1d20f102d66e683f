"""OLMoE (Muennighoff et al., 2024): Llama with experts, and with norms across all heads of queries and keys."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.limited import Limited
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .olmo2 import NormedQkv
from .qwen2_moe import SparseQwenLayer
from .sparse_config import SparseConfig, read_experts_per_token


class OlmoeConfig(SparseConfig, frozen=True, kw_only=True):
    limit: float | None  # of the absolute values of queries, keys and values


class OlmoeLayer(SparseQwenLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, OlmoeConfig)
        qkv = NormedQkv(config, source, super().qkv(config, source))
        return qkv if config.limit is None else Limited(qkv, config.limit)


class Olmoe(Llama):
    layer = OlmoeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias = file.flag("attention_bias")
        experts = file.count("num_experts", 64)
        return read_llama_config(
            OlmoeConfig,
            file,
            Defaults(4096, rms_norm_eps=1e-5),
            qkv_bias=bias,
            output_bias=bias,
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            routing=Routing(read_experts_per_token(file, experts, 8), normalize=file.flag("norm_topk_prob")),
            limit=None if file.fields.get("clip_qkv") is None else file.number("clip_qkv"),
        )
