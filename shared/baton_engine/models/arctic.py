"""Arctic (Snowflake, 2024): Llama whose layers have experts beside attention and a dense MLP after it."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import GatedMlp
from baton_engine.layers.norm import RmsNorm
from baton_engine.shard import Columns, Rows
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Layer, Llama, LlamaConfig, read_llama_config
from .mixtral import MixtralLayer
from .sparse_config import SparseConfig, read_experts_per_token


class ArcticLayer(MixtralLayer):
    def __init__(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        assert isinstance(config, SparseConfig)
        super().__init__(config, source, layer, rotary)
        self.dense: GatedMlp | None = None
        if layer not in config.dense_layers:
            hidden = config.hidden_size
            self.dense = _mlp(config, source.at("residual_mlp"), hidden)
            self.dense_norm = RmsNorm(source.at("residual_layernorm"), hidden, config.rms_norm_eps).before(self.dense)

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, SparseConfig)
        if layer in config.dense_layers:
            return _mlp(config, source.at("block_sparse_moe.mlp"), config.intermediate_size)
        return super().make_mlp(config, source, layer)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.dense is None:
            return super().__call__(x, residual, ctx)
        normed, residual = self.input_norm.add(x, residual)
        attended = self.attention(normed, ctx)
        # The experts read what attention reads.
        chosen = self.mlp(self.post_attention_norm(residual))
        normed, residual = self.dense_norm.add(attended, residual)
        return self.dense(normed).add_(chosen), residual


def _mlp(config: LlamaConfig, source: Source, size: int) -> GatedMlp:
    """Return a dense MLP. size: its hidden units."""
    hidden = config.hidden_size
    gate_up = Linear(source, ["w1", "w3"], [size, size], hidden, shard=Columns(source.ranks))
    return GatedMlp(gate_up, Linear(source, ["w2"], [hidden], size, shard=Rows(source.ranks)), config.activation)


class Arctic(Llama):
    layer: Callable[..., Layer] = ArcticLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # Without this field layers have no dense MLP, which is not so in the published models.
        file = file.with_defaults({"parallel_attn_mlp_res": False})
        for name, values in (("parallel_attn_mlp_res", (True,)), ("use_residual", (True,)), ("sliding_window", ())):
            file.require_absent(name, *values)
        experts, every = file.count("num_local_experts", 8), file.count("moe_layer_frequency", 2)
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(4096, rms_norm_eps=1e-5, rope_theta=1e6),
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            routing=Routing(read_experts_per_token(file, experts, 1), normalize=True),
            shared_size=file.count("hidden_size"),
            dense_layers=frozenset(layer for layer in range(file.count("num_hidden_layers")) if (layer + 1) % every),
        )
