"""Mixtral (Jiang et al., "Mixtral of Experts", 2024): Mistral with experts in place of each MLP."""

from collections.abc import Callable

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import ExpertNames
from baton_engine.layers.experts import ExpertMlp, Router, load_experts
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .sliding_windows import same_window
from .sparse_config import SparseConfig, read_experts_per_token

NAMES = ExpertNames(gate="w1", up="w3", down="w2")


class MixtralLayer(LlamaLayer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        assert isinstance(config, SparseConfig)
        source, experts, hidden = source.at("block_sparse_moe"), config.num_experts, config.hidden_size
        router = Router(source.at("gate"), config.routing, experts, hidden, correction=self.correction(config, source))
        names = NAMES.gated(config.activation)
        held = load_experts(source.at("experts"), names, experts, hidden, config.expert_size)
        return ExpertMlp(router, held, source.ranks)

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        """Return the correction of the router's scores, as in Router. source: of the layer's MLP."""
        return None


class Mixtral(Llama):
    layer = MixtralLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        experts = file.count("num_local_experts", 8)
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(131072, num_kv_heads=8, rms_norm_eps=1e-5, rope_theta=1e6),
            same_window(file),
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            routing=Routing(read_experts_per_token(file, experts, 2), normalize=True),
        )
