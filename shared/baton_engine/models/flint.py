"""Flint (Recursive, 2026): norms of each head, attention sinks, rotation where a layer has a window, and experts chosen
by sigmoids beside one that all tokens use."""

from baton_engine.config_file import ConfigFile
from baton_kernels.reference.routing import Routing

from .deepseek_experts import UncorrectedExpertsLayer
from .exaone4 import RotatesInWindows
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sparse_config import SparseConfig, read_dense_layers, read_experts_per_token

# Those of transformers' configuration class.
_DEFAULTS = {
    "vocab_size": 150144, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 49,
    "num_attention_heads": 32, "mlp_only_layers": [0, 1],
}  # fmt: skip


class FlintConfig(RotatesInWindows, SparseConfig, frozen=True, kw_only=True):
    pass


class FlintLayer(UncorrectedExpertsLayer):
    sinks = "softmax_offset"
    shared = "shared_expert"


class Flint(Llama):
    layer = FlintLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        layers, experts = file.count("num_hidden_layers"), file.count("num_experts", 256)
        bias = file.flag("attention_bias")
        return read_llama_config(
            FlintConfig,
            file,
            Defaults(262144, num_kv_heads=4, head_dim=128),
            _windows(file, layers),
            sinks=True,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size", 512),
            routing=Routing(
                read_experts_per_token(file, experts, 6), sigmoid=True, normalize=file.flag("norm_topk_prob", True)
            ),
            shared_size=file.integer("shared_expert_intermediate_size", 1024),
            dense_layers=read_dense_layers(file, layers),
        )


def _windows(file: ConfigFile, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: where layer_types says so, or else in three of four layers between the first two
    and the last."""
    window = file.count("sliding_window", 513)
    types = file.layer_types("layer_types", layers)
    if types is None:
        full = {0, 1, layers - 1, *range(1, layers, 4)}
        types = ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)
