"""Command A+ (Cohere, 2026): Command A with experts beside attention, chosen by softmax or by sigmoids."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.norm import RmsNorm
from baton_engine.layers.rope import Rope
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .cohere import Cohere, read_cohere_config
from .deepseek_experts import UncorrectedExpertsLayer
from .layer_norm_llama import LayerNormLayer, SparseLayerNormConfig
from .llama import LlamaConfig
from .sliding_windows import windows_in_turn
from .sparse_config import read_experts_per_token, read_layers_without_experts


class Cohere2MoeConfig(SparseLayerNormConfig, frozen=True, kw_only=True):
    """logit_scale: the factor of logits. rms: norms are RMSNorms. averaged: the results of a token's experts and of
    the one that all tokens use are averaged instead of added. dense_rotated: layers without experts rotate queries and
    keys even if they have no window."""

    logit_scale: float
    rms: bool
    averaged: bool
    dense_rotated: bool

    def norm(self, source: Source) -> Any:
        return RmsNorm(source, self.hidden_size, self.rms_norm_eps) if self.rms else super().norm(source)

    def rope_of(self, layer: int) -> Rope | None:
        rotated = self.attention[layer].window is not None or (self.dense_rotated and layer in self.dense_layers)
        return self.rope if rotated else None

    def fingerprint_facts(self) -> dict[str, Any]:
        return {
            **super().fingerprint_facts(),
            "rotating": [self.rope_of(layer) is not None for layer in range(self.num_layers)],
        }


class Cohere2MoeLayer(LayerNormLayer, UncorrectedExpertsLayer):
    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, Cohere2MoeConfig)
        mlp = super().make_mlp(config, source, layer)
        if not config.averaged or layer in config.dense_layers:
            return mlp
        return lambda x: mlp(x).div_(2)


class Cohere2Moe(Cohere):
    layer = Cohere2MoeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", 8)
        size, shared = file.count("intermediate_size"), file.integer("num_shared_experts", 0)
        sigmoid = file.choice("expert_selection_fn", "softmax", ("softmax", "sigmoid")) == "sigmoid"
        averaged = file.choice("shared_expert_combination_strategy", "average", ("average", "sum")) == "average"
        # A config has the epsilon of the norms that the model has.
        rms = file.fields.get("rms_norm_eps") is not None
        # transformers reads rope_parameters alone, and would not scale.
        file.require_absent("rope_scaling")
        fields: dict[str, Any] = {
            "head_dim": file.count("head_dim", 128),
            "rope_theta": file.number("rope_theta", 10000.0),
            "layer_norm_eps": file.number("rms_norm_eps" if rms else "layer_norm_eps", 1e-5),
            "intermediate_size": file.count("prefix_dense_intermediate_size", size),
        }
        return read_cohere_config(
            Cohere2MoeConfig,
            ConfigFile({**file.fields, **fields}),
            _windows(file, layers),
            num_experts=experts,
            expert_size=size,
            # The scores of the chosen experts: the softmax of their logits alone, or their sigmoids.
            routing=Routing(
                read_experts_per_token(file, experts, 2), sigmoid=sigmoid,
                normalize=not sigmoid or file.flag("norm_topk_prob", True),
            ),
            shared_size=shared * size,
            dense_layers=read_layers_without_experts(file, layers, 0),
            rms=rms,
            averaged=averaged and shared > 0,
            dense_rotated=file.count("prefix_dense_sliding_window_pattern", 1) == 1,
        )  # fmt: skip


def _windows(file: ConfigFile, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer. Without layer_types, windows of the first layers without experts have a pattern
    of their own, and the layers after them begin another one."""
    if file.fields.get("layer_types") is not None:
        return windows_in_turn(file, layers, 4)
    first = min(file.integer("first_k_dense_replace", 0), layers)
    pattern = {"sliding_window_pattern": file.count("prefix_dense_sliding_window_pattern", 1)}
    dense = windows_in_turn(ConfigFile({**file.fields, **pattern}), first, 4)
    return dense + windows_in_turn(file, layers - first, 4)
