"""Qwen1.5-MoE and Qwen2-MoE (Qwen Team, 2024): Qwen2 with experts, one of which all tokens use."""

from collections.abc import Callable

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.experts import ExpertMlp, ExpertNames, WithSharedExpert
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .sliding_windows import optional_windows
from .sparse_config import SparseConfig, read_dense_layers, read_experts_per_token

NAMES = ExpertNames(router="gate", gate="gate_proj", up="up_proj", down="down_proj")


class SparseQwenLayer(LlamaLayer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        assert isinstance(config, SparseConfig)
        if layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        source, hidden, shared = source.at("mlp"), config.hidden_size, config.shared_size
        experts = ExpertMlp(
            source, NAMES, hidden=hidden, size=config.expert_size, experts=config.num_experts,
            chosen=config.experts_per_token, normalize=config.normalize,
        )  # fmt: skip
        if not shared:
            return experts
        inside = source.at("shared_expert")
        gate_up = Linear(inside, ["gate_proj", "up_proj"], [shared, shared], hidden)
        mlp = GatedMlp(gate_up, Linear(inside, ["down_proj"], [hidden], shared), "silu")
        return WithSharedExpert(experts, mlp, Linear(source, ["shared_expert_gate"], [1], hidden, sensitive=True))


class Qwen2Moe(Llama):
    layer = SparseQwenLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", 60)
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(32768, num_kv_heads=16),
            optional_windows(file, layers),
            qkv_bias=file.flag("qkv_bias", True),
            num_experts=experts,
            experts_per_token=read_experts_per_token(file, experts, 4),
            expert_size=file.count("moe_intermediate_size", 1408),
            normalize=file.flag("norm_topk_prob"),
            shared_size=file.count("shared_expert_intermediate_size", 5632),
            dense_layers=read_dense_layers(file, layers),
        )
