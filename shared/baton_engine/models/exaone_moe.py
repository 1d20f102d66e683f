"""K-EXAONE (LG AI Research, 2026): EXAONE 4 with norms before each block and DeepSeek-V3's experts."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.experts import Router
from baton_engine.layers.rope import Rope
from baton_engine.source import Source

from .deepseek_experts import routed_and_shared
from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .sliding_windows import windows_in_turn
from .sparse_config import SparseConfig, read_grouped_routing, read_layers_without_experts


class ExaoneMoeConfig(SparseConfig, frozen=True, kw_only=True):
    def rope_of(self, layer: int) -> Rope | None:
        everywhere = not any(spec.window for spec in self.attention)
        return self.rope if everywhere or self.attention[layer].window else None


class ExaoneMoeLayer(LlamaLayer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, SparseConfig)
        if layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        source, experts = source.at("mlp"), config.num_experts
        correction = source.take("e_score_correction_bias", (experts,), dtype=torch.float32)
        router = Router(source.at("gate"), config.routing, experts, config.hidden_size, correction=correction)
        return routed_and_shared(config, source, router)


class ExaoneMoe(Llama):
    layer = ExaoneMoeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", 64)
        size = file.count("moe_intermediate_size", 1024)
        scaled = ConfigFile({"routed_scaling_factor": 2.5, **file.fields})
        return read_llama_config(
            ExaoneMoeConfig,
            file,
            Defaults(2048, num_kv_heads=32, rms_norm_eps=1e-5),
            windows_in_turn(file, layers, 4),
            qk_norm=True,
            num_experts=experts,
            expert_size=size,
            routing=read_grouped_routing(
                scaled, experts, 8, sigmoid=True, normalize=file.flag("norm_topk_prob", True), group_best=2
            ),
            shared_size=file.integer("num_shared_experts", 1) * size,
            dense_layers=read_layers_without_experts(file, layers, 1),
        )
