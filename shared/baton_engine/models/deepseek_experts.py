"""Layers of experts with the names of DeepSeek's checkpoints: routed ones and those that all tokens use, as one wider
expert."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.experts_method import ExpertsMethod
from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_experts
from baton_engine.source import Source

from .llama import LlamaConfig, LlamaLayer
from .qwen2_moe import NAMES, shared_expert
from .sparse_config import SparseConfig


class DeepseekExpertsLayer(LlamaLayer):
    """A Llama layer with such experts, unless the config names it among the dense ones.

    router, shared: the names of the router and of the expert that all tokens use. router_transposed: as in Router.
    """

    router = "gate"
    router_transposed = False
    shared = "shared_experts"

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, SparseConfig)
        if layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        source, count, hidden = self.block(source, 1), config.num_experts, config.hidden_size
        router = Router(
            source.at(self.router), config.routing, count, hidden, correction=self.correction(config, source),
            transposed=self.router_transposed,
        )  # fmt: skip
        held = self.load_experts(config, source.at("experts"))
        experts = ExpertMlp(router, held, source.ranks)
        if not config.shared_size:
            return experts
        return WithSharedExpert(experts, self.shared_expert(config, source.at(self.shared)), source.ranks)

    def shared_expert(self, config: SparseConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        """Return the expert that all tokens use, as WithSharedExpert has it."""
        size, hidden = config.shared_size, config.hidden_size
        return shared_expert(source, size, hidden, config.activation, config.mlp_bias, self.gates)

    def load_experts(self, config: SparseConfig, source: Source) -> ExpertsMethod:
        names = NAMES.gated(config.activation)
        return load_experts(source, names, config.num_experts, config.hidden_size, config.expert_size)

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        """Return the correction of the router's scores, as in Router. source: of the layer's MLP."""
        return source.take("gate.e_score_correction_bias", (config.num_experts,), dtype=torch.float32)


class UncorrectedExpertsLayer(DeepseekExpertsLayer):
    """A layer with such experts, which the router chooses by its scores alone."""

    def correction(self, config: SparseConfig, source: Source) -> None:
        return None
