"""A.X K1 (SK Telecom, 2026): DeepSeek-V3 with a norm after the experts of each layer."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.norm import NormedOutput, RmsNorm
from baton_engine.source import Source

from .deepseek_v2 import DeepseekLayer, read_deepseek_config
from .deepseek_v3 import DEFAULTS, DeepseekV3
from .llama import LlamaConfig
from .sparse_config import SparseConfig, read_layers_without_experts


class AxK1Layer(DeepseekLayer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, SparseConfig)
        mlp = super().make_mlp(config, source, layer)
        if layer in config.dense_layers:
            return mlp
        return NormedOutput(mlp, RmsNorm(source.at("post_mlp_layernorm"), config.hidden_size, config.rms_norm_eps))

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        # The published checkpoint has none.
        return super().correction(config, source) if "gate.e_score_correction_bias" in source else None


class AxK1(DeepseekV3):
    layer = AxK1Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.choice("scoring_func", "sigmoid", ("sigmoid",))
        layers = file.count("num_hidden_layers")
        named = file.fields.get("mlp_layer_types") is not None
        defaults = {**DEFAULTS, "max_position_embeddings": 32768, "n_routed_experts": 192, "first_k_dense_replace": 1}
        return read_deepseek_config(
            # transformers has no other projection to queries for this family.
            ConfigFile({**file.fields, "q_lora_rank": file.count("q_lora_rank", 1536)}), defaults, chosen=8,
            dense_layers=read_layers_without_experts(file, layers, 1) if named else None,
            interleaved=file.flag("rope_interleave", True), corrected=True, sigmoid=True,
            normalize=file.flag("norm_topk_prob", True), group_best=2,
        )  # fmt: skip
