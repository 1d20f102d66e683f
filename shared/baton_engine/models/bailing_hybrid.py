"""Ling 3.0 (Ling Team, 2026): most layers have Kimi Linear's delta rule with bounded decays, the others DeepSeek's
latent attention with a gate of each head's result.

The layers for multi-token prediction are not read.
"""

from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.gated_latents import HeadGatedLatents
from baton_engine.layers.linear import Linear
from baton_engine.layers.recurrence import OneProjection
from baton_engine.source import Source
from baton_kernels.reference.recurrence import StateShape

from .latent_states import LatentStatesLayer, read_latent_states, with_deepseek_names
from .llama import Llama, LlamaConfig
from .sparse_config import SparseConfig, read_layers_without_experts

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 157_184, "hidden_size": 2560, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 42, "num_attention_heads": 32, "max_position_embeddings": 262_144, "rope_theta": 6e6,
    "n_routed_experts": 512, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
}  # fmt: skip


class BailingHybridLayer(LatentStatesLayer):
    blocks = ("attention", "mlp")
    output = "dense"
    attention_class = HeadGatedLatents

    def delta_inputs(self, shape: StateShape, source: Source, hidden: int) -> OneProjection:
        names = ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_proj"]
        sizes = [shape.keys, shape.keys, shape.values, shape.values, shape.value_heads, shape.keys]
        return OneProjection(Linear(source, names, sizes, hidden), shape, shape.key_dim)

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return source.take("gate.expert_bias", (config.num_experts,), dtype=torch.float32)


class BailingHybrid(Llama):
    layer = BailingHybridLayer
    embedding_name = "word_embeddings"

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.choice("score_function", "sigmoid", ("sigmoid",))
        file = with_deepseek_names(file).with_defaults(_DEFAULTS)
        layers, heads = file.count("num_hidden_layers"), file.count("num_attention_heads")
        every = file.count("layer_group_size", 6)
        default = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
        kinds = file.layer_types("layer_types", layers, ("full_attention", "linear_attention")) or default
        # transformers writes the rotated elements of a head as head_dim, and then it adds the other field.
        dim = file.count("linear_head_dim", file.count("head_dim", 128))
        least = file.number("kda_lower_bound", -5.0)
        if least >= 0:
            raise ConfigError(f"kda_lower_bound in config.json is {least}; it must be less than 0")
        return read_latent_states(
            file,
            frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
            heads,
            dim,
            file.count("short_conv_kernel_size", 4),
            read_layers_without_experts(file, layers, 2),
            least if file.flag("kda_safe_gate", True) else 0.0,
        )
