"""Experts with the names of DeepSeek's checkpoints: routed ones and those that all tokens use, as one wider expert."""

from collections.abc import Callable

import torch

from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_experts
from baton_engine.source import Source

from .qwen2_moe import NAMES, shared_expert
from .sparse_config import SparseConfig


def make_experts(config: SparseConfig, source: Source, corrected: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a layer's MLP, from [T, hidden] to [T, hidden]. corrected: the router has a correction of its scores."""
    count, hidden = config.num_experts, config.hidden_size
    gate = source.at("gate")
    correction = gate.take("e_score_correction_bias", (count,), dtype=torch.float32) if corrected else None
    router = Router(gate, config.routing, count, hidden, correction=correction)
    return routed_and_shared(config, source, router)


def routed_and_shared(config: SparseConfig, source: Source, router: Router) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the experts that a router chooses, and the shared one, if there is one."""
    count, hidden, shared = config.num_experts, config.hidden_size, config.shared_size
    held = load_experts(source.at("experts"), NAMES, count, hidden, config.expert_size)
    experts = ExpertMlp(router, held, source.ranks)
    if not shared:
        return experts
    return WithSharedExpert(experts, shared_expert(source.at("shared_experts"), shared, hidden), source.ranks)
