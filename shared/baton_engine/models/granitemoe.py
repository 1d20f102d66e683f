"""Granite 3 with experts (IBM, 2024), maybe beside one that all tokens use."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import JoinedForm
from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_joined_experts
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.shard import Columns, Rows
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .granite import Granite, GraniteLayer, Multipliers, read_granite_config
from .llama import Kind, LlamaConfig
from .sparse_config import SparseConfig, read_experts_per_token


class GraniteMoeConfig(SparseConfig, frozen=True, kw_only=True):
    multipliers: Multipliers

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "multipliers": [self.multipliers.embeddings, self.multipliers.residual]}


class GraniteMoeLayer(GraniteLayer):
    """router: its name. form: how the experts are stored."""

    router = "router.layer"
    form = JoinedForm("input_linear.weight", "output_linear.weight", apart="experts")

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, GraniteMoeConfig)
        sparse, experts, hidden = source.at("block_sparse_moe"), config.num_experts, config.hidden_size
        router = Router(sparse.at(self.router), config.routing, experts, hidden)
        held = load_joined_experts(sparse, experts, hidden, config.expert_size, self.form.gated(config.activation))
        mlp, shared = ExpertMlp(router, held, source.ranks), config.shared_size
        if not shared:
            return mlp
        return WithSharedExpert(mlp, shared_mlp(config, source, shared, Rows(source.ranks, joins=False)), source.ranks)


def shared_mlp(config: LlamaConfig, source: Source, units: int, rows: Rows) -> GatedMlp:
    """Return the MLP that all tokens use. source: of the layer. units: hidden ones. rows: how ranks divide them."""
    source, hidden = source.at("shared_mlp"), config.hidden_size
    gate_up = Linear(
        source, ["input_linear"], [2 * units], hidden, parts=[units, units], shard=Columns(source.ranks)
    )  # fmt: skip
    return GatedMlp(gate_up, Linear(source, ["output_linear"], [hidden], units, shard=rows), config.activation)


class GraniteMoe(Granite):
    layer = GraniteMoeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_granite_moe_config(GraniteMoeConfig, file)


def read_granite_moe_config(kind: type[Kind], file: ConfigFile, **facts: Any) -> Kind:
    """Return the config of a config.json with the fields of Granite with experts. kind, facts: as in
    read_granite_config."""
    experts = file.count("num_local_experts", 8)
    return read_granite_config(
        kind,
        file,
        num_experts=experts,
        expert_size=file.count("intermediate_size"),
        # The softmax of the chosen experts' logits alone.
        routing=Routing(read_experts_per_token(file, experts, 2), normalize=True),
        shared_size=file.integer("shared_intermediate_size", 0),
        **facts,
    )
