"""K-EXAONE (LG AI Research, 2026): EXAONE 4 with norms before each block and DeepSeek-V3's experts."""

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.source import Source

from .deepseek_experts import DeepseekExpertsLayer
from .exaone4 import RotatesInWindows
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sliding_windows import windows_in_turn
from .sparse_config import SparseConfig, read_grouped_routing, read_layers_without_experts


class ExaoneMoeConfig(RotatesInWindows, SparseConfig, frozen=True, kw_only=True):
    everywhere: bool


class ExaoneMoeLayer(DeepseekExpertsLayer):
    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return source.take("e_score_correction_bias", (config.num_experts,), dtype=torch.float32)


class ExaoneMoe(Llama):
    layer = ExaoneMoeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # K-EXAONE 2 has windows of several sizes, and limits of gates.
        file.require_absent("sliding_windows")
        file.require_absent("swiglu_limits")
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", 64)
        size = file.count("moe_intermediate_size", 1024)
        scaled = ConfigFile({"routed_scaling_factor": 2.5, **file.fields})
        return read_llama_config(
            ExaoneMoeConfig,
            file,
            Defaults(2048, num_kv_heads=32, rms_norm_eps=1e-5),
            windows_in_turn(file, layers, 4),
            qk_norm=True,
            everywhere=file.fields.get("sliding_window", 0) is None,
            num_experts=experts,
            expert_size=size,
            routing=read_grouped_routing(
                scaled, experts, 8, sigmoid=True, normalize=file.flag("norm_topk_prob", True), group_best=2
            ),
            shared_size=file.integer("num_shared_experts", 1) * size,
            dense_layers=read_layers_without_experts(file, layers, 1),
        )
