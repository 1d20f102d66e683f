"""The config of Gemma 4's text part, in all sizes."""

from typing import Any, Self

import msgspec

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_kernels.reference.routing import Routing

from .full_heads import WithFullHeads
from .gemma3 import read_gemma_config
from .shared_kv import SharedKvConfig
from .sliding_windows import ropes_by_window

_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


class Gemma4Config(WithFullHeads, SharedKvConfig, frozen=True, kw_only=True):
    """num_kv_heads, head_dim: of layers with a window. full_kv_heads, full_head_dim: of the others. shares_keys: the
    values of the others are their keys before the norm. expert_size: 0 = no layer has experts.

    shared_mlp_size: hidden units of the MLPs of layers without keys and values of their own.
    """

    full_kv_heads: int
    full_head_dim: int
    shares_keys: bool
    shared_mlp_size: int
    expert_size: int = 0
    routing: Routing = Routing(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full_head_dim % 2:
            raise ConfigError(f"global_head_dim is {self.full_head_dim}; it must be even")

    def mlp_size(self, layer: int) -> int:
        """Return the hidden units of a layer's MLP."""
        return self.intermediate_size if layer < self.kv_layers else self.shared_mlp_size

    @property
    def head_dims(self) -> tuple[int, ...]:
        return tuple({self.head_dim: None, self.full_head_dim: None})

    @property
    def layer_weights(self) -> int:
        """As in ModelConfig, for a layer with a window, as most are."""
        return self._dense_weights + self._expert_weights(self.routing.count)

    def layer_weights_read(self, tokens: float) -> float:
        """As in ModelConfig, for a layer with a window and tokens that use all experts equally often."""
        used = 1 - (1 - self.routing.count / self.num_experts) ** tokens if self.num_experts else 0.0
        return self._dense_weights + self._expert_weights(self.num_experts * used)

    @property
    def mlp_units(self) -> float:
        return self._mean_mlp_size + (self.routing.count * self.expert_size if self.num_experts else 0)

    def of_layer(self, layer: int) -> Self:
        if self.attention[layer].window is not None:
            return self
        return msgspec.structs.replace(self, num_kv_heads=self.full_kv_heads, head_dim=self.full_head_dim)

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "full_heads": [self.full_kv_heads, self.full_head_dim]}

    @property
    def _mean_mlp_size(self) -> float:
        return sum(map(self.mlp_size, range(self.num_layers))) / self.num_layers

    @property
    def _dense_weights(self) -> int:
        """The elements of a layer's weight matrices beside those of a router and of experts, with a mean MLP."""
        return self.attention_weights + round(self.hidden_size * (3 * self._mean_mlp_size + 2 * self.input_size))

    def _expert_weights(self, experts: float) -> int:
        """Return the elements of a layer's router and of so many of its experts."""
        return round(self.hidden_size * (self.num_experts + 3 * experts * self.expert_size)) if self.num_experts else 0


_IMAGES = ("use_bidirectional_attention", "vision")


def read_gemma4_config(
    file: ConfigFile, window: int = 512, context: int = 131072, input_size: int = 256
) -> Gemma4Config:
    """Return the config of a config.json. window, context, input_size: where config.json has none."""
    layers, context = file.count("num_hidden_layers", 30), file.count("max_position_embeddings", context)
    window, types = file.count("sliding_window", window), _layer_types(file, layers)
    full_kv_heads, full_head_dim = _full_heads(file, types)
    file = ConfigFile({**file.fields, "rope_parameters": file.fields.get("rope_parameters") or _ROPES})
    rope, window_rope = ropes_by_window(file, context, 1e6, 1e4)
    experts: dict[str, Any] = {}
    if file.flag("enable_moe_block"):
        count = file.count("num_experts")
        chosen = file.at_most("top_k_experts", count, count)
        experts = {"num_experts": count, "expert_size": file.count("moe_intermediate_size")}
        experts["routing"] = Routing(chosen, normalize=True)
    # Images see each other in both directions, and texts do not.
    text = {name: value for name, value in file.fields.items() if (name, value) != _IMAGES}
    return read_gemma_config(
        Gemma4Config,
        ConfigFile(text),
        context,
        vocab_size=file.count("vocab_size", 262144),
        attention=tuple(
            AttentionSpec(scale=1.0, window=window if kind == "sliding_attention" else None) for kind in types
        ),
        rope=rope,
        window_rope=window_rope,
        qk_norm=True,
        full_kv_heads=full_kv_heads,
        full_head_dim=full_head_dim,
        shares_keys=file.flag("attention_k_eq_v"),
        logit_softcap=file.number("final_logit_softcapping", 0.0),
        shared_layers=file.integer("num_kv_shared_layers", 0),
        shared_mlp_size=file.count("intermediate_size", 9216) * (2 if file.flag("use_double_wide_mlp") else 1),
        input_size=file.integer("hidden_size_per_layer_input", input_size),
        input_vocab=file.count("vocab_size_per_layer_input", 262144),
        **experts,
    )


def _layer_types(file: ConfigFile, layers: int) -> list[str]:
    """Return the kind of each layer. The last one always sees all tokens."""
    types = file.layer_types("layer_types", layers) or [
        "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)
    ]
    return [*types[:-1], "full_attention"]


def _full_heads(file: ConfigFile, types: list[str]) -> tuple[int, int]:
    """Return the number of key-value heads of layers that see all tokens, and their dim.

    transformers writes them as per_layer_config, by the number of each such layer.
    """
    kv_heads, shares_keys = file.count("num_key_value_heads", 4), file.flag("attention_k_eq_v")
    if file.fields.get("per_layer_config") is None:
        own = file.count("num_global_key_value_heads", kv_heads) if shares_keys else kv_heads
        return own, file.count("global_head_dim", 512)
    given, head_dim = file.part("per_layer_config"), file.count("head_dim", 256)
    full = [given.part(str(layer)) for layer, kind in enumerate(types) if kind == "full_attention"]
    each = {(layer.count("num_key_value_heads", kv_heads), layer.count("head_dim", head_dim)) for layer in full}
    named = {name for name in given.fields if name != "architectures"}
    if len(each) > 1 or len(named) > len(full):
        raise ConfigError("per_layer_config in config.json must give all layers that see all tokens the same heads")
    return each.pop()
