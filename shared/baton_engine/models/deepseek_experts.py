"""Experts with the names of DeepSeek's checkpoints: routed ones and those that all tokens use, as one wider expert."""

from collections.abc import Callable

import torch

from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_experts
from baton_engine.source import Source

from .qwen2_moe import NAMES, shared_expert
from .sparse_config import SparseConfig


def make_experts(config: SparseConfig, source: Source, corrected: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a layer's MLP, from [T, hidden] to [T, hidden]. corrected: as in Router."""
    count, hidden, shared = config.num_experts, config.hidden_size, config.shared_size
    router = Router(source.at("gate"), config.routing, count, hidden, corrected=corrected)
    held = load_experts(source.at("experts"), NAMES, count, hidden, config.expert_size)
    experts = ExpertMlp(router, held, source.ranks)
    if not shared:
        return experts
    return WithSharedExpert(experts, shared_expert(source.at("shared_experts"), shared, hidden), source.ranks)
