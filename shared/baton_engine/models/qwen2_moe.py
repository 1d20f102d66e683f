"""Qwen1.5-MoE and Qwen2-MoE (Qwen Team, 2024): Qwen2 with experts, one of which all tokens use."""

from collections.abc import Callable

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import ExpertNames, ExpertsMethod
from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_experts
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.shard import Columns, Rows
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .qwen2 import within_one_chunk
from .sliding_windows import optional_windows
from .sparse_config import SparseConfig, read_dense_layers, read_experts_per_token

NAMES = ExpertNames(gate="gate_proj", up="up_proj", down="down_proj")


def shared_expert(
    source: Source, size: int, hidden: int, activation: str, bias: bool = False,
    gates: tuple[str, str] = ("gate_proj", "up_proj"),
) -> GatedMlp:  # fmt: skip
    """Return the expert that all tokens use, as far as this rank computes it. gates: as in LlamaLayer."""
    gate_up = Linear(source, [*gates], [size, size], hidden, bias=bias, shard=Columns(source.ranks))
    down = Linear(source, ["down_proj"], [hidden], size, bias=bias, shard=Rows(source.ranks, joins=False))
    return GatedMlp(gate_up, down, activation)


class SparseQwenLayer(LlamaLayer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        assert isinstance(config, SparseConfig)
        if layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        source, hidden, shared = source.at("mlp"), config.hidden_size, config.shared_size
        count = config.num_experts
        router = Router(source.at("gate"), config.routing, count, hidden)
        held = self.load_experts(config, source.at("experts"))
        experts = ExpertMlp(router, held, source.ranks)
        if not shared:
            return experts
        mlp = shared_expert(source.at("shared_expert"), shared, hidden, config.activation)
        gate = Linear(source, ["shared_expert_gate"], [1], hidden, sensitive=True)
        return WithSharedExpert(experts, mlp, source.ranks, gate)

    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        names = NAMES.gated(config.activation)
        return load_experts(source, names, config.num_experts, config.hidden_size, config.expert_size)


class Qwen2Moe(Llama):
    layer = SparseQwenLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = within_one_chunk(file)
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", 60)
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(32768, num_kv_heads=16),
            optional_windows(file, layers),
            qkv_bias=file.flag("qkv_bias", True),
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size", 1408),
            routing=Routing(read_experts_per_token(file, experts, 4), normalize=file.flag("norm_topk_prob")),
            shared_size=file.count("shared_expert_intermediate_size", 5632),
            dense_layers=read_dense_layers(file, layers),
        )
