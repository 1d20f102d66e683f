"""Experts with the names of DeepSeek's checkpoints: routed ones and those that all tokens use, as one wider expert."""

from collections.abc import Callable

import torch

from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_experts
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.source import Source

from .qwen2_moe import NAMES
from .sparse_config import SparseConfig


def make_experts(config: SparseConfig, source: Source, corrected: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a layer's MLP, from [T, hidden] to [T, hidden]. corrected: as in Router."""
    count, hidden, shared = config.num_experts, config.hidden_size, config.shared_size
    router = Router(source.at("gate"), config.routing, count, hidden, corrected=corrected)
    experts = ExpertMlp(router, load_experts(source.at("experts"), NAMES, count, hidden, config.expert_size))
    if not shared:
        return experts
    inside = source.at("shared_experts")
    gate_up = Linear(inside, ["gate_proj", "up_proj"], [shared, shared], hidden)
    return WithSharedExpert(experts, GatedMlp(gate_up, Linear(inside, ["down_proj"], [hidden], shared), "silu"))
