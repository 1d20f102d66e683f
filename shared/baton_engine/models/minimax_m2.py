"""MiniMax-M2 (MiniMax, 2025): experts chosen by sigmoids, norms across all heads of queries and keys."""

from collections.abc import Callable

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import fraction_of, read_rope
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .mixtral import MixtralLayer
from .olmo2 import NormedQkv
from .sparse_config import SparseConfig, read_experts_per_token


class MiniMaxM2Layer(MixtralLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[torch.Tensor], torch.Tensor]:
        return NormedQkv(config, source, super().qkv(config, source))

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return source.take("e_score_correction_bias", (config.num_experts,), dtype=torch.float32)


class MiniMaxM2(Llama):
    layer = MiniMaxM2Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("use_qk_norm", True)
        file.require_absent("qk_norm_type", "per_layer")
        file.require_absent("scoring_func", "sigmoid")
        file.require_absent("use_routing_bias", True)
        experts, context = file.count("num_local_experts", 256), file.count("max_position_embeddings", 196608)
        dim = file.count("head_dim", 128)
        rotated = fraction_of(file.at_most("rotary_dim", dim, dim), dim)
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(196608, num_kv_heads=8, head_dim=128),
            rope=read_rope(file, context, partial=rotated, theta=5e6),
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            routing=Routing(read_experts_per_token(file, experts, 8), sigmoid=True, normalize=True),
        )
