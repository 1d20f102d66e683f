"""MiMo-V2-Flash (Xiaomi, 2025): keys that are larger than values, fewer key-value heads in layers without a window,
sinks in those with one, a factor of the values, and experts chosen by sigmoids.

The layers for multi-token prediction are not read.
"""

from collections.abc import Callable
from typing import Any, Self

import msgspec
import torch

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.linear import Linear
from baton_engine.layers.rope import Rope
from baton_engine.layers.scaled_values import ScaledValues
from baton_engine.shard import head_part
from baton_engine.source import Source

from .deepseek_experts import DeepseekExpertsLayer
from .full_heads import WithFullHeads
from .llama import Defaults, Llama, LlamaConfig, read_llama_config
from .sliding_windows import WithWindowRope, partial_rope
from .sparse_config import SparseConfig, read_grouped_routing, read_layers_without_experts

_CONTEXT, _PARTIAL = 131072, 0.334
# Those of transformers' configuration class.
_DEFAULTS = {
    "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
    "num_attention_heads": 64, "head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4,
}  # fmt: skip
# The values with which every model of the family is computed.
_GIVEN: dict[str, tuple[Any, ...]] = {
    "hybrid_block_size": (), "n_shared_experts": (0,), "rope_scaling": (), "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}  # fmt: skip
# Sizes of layers with a window that must be those of the others.
_SAME = ("num_attention_heads", "head_dim", "v_head_dim")


class MiMoV2FlashConfig(WithFullHeads, WithWindowRope, SparseConfig, frozen=True, kw_only=True):
    """num_kv_heads, full_kv_heads: as in WithFullHeads. value_factor: by which values are multiplied."""

    window_rope: Rope
    full_kv_heads: int
    value_dim: int
    value_factor: float

    def of_layer(self, layer: int) -> Self:
        """Return the config with the heads and the rope of a layer as those of all."""
        kv_heads = self.full_kv_heads if self.attention[layer].window is None else self.num_kv_heads
        return msgspec.structs.replace(self, num_kv_heads=kv_heads, rope=self.rope_of(layer))

    @property
    def attention_weights(self) -> int:
        """As in ModelConfig, on average over layers."""
        each = (self.of_layer(layer).projections for layer in range(self.num_layers))
        return sum(outputs * inputs for layer in each for outputs, inputs in layer) // self.num_layers

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "full_kv_heads": self.full_kv_heads, "value_dim": self.value_dim}


class MiMoV2FlashLayer(DeepseekExpertsLayer):
    sinks = "attention_sink_bias"

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        assert isinstance(config, MiMoV2FlashConfig)
        return super().make_attention(config.of_layer(layer), source, layer, rotary)

    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, MiMoV2FlashConfig)
        qkv, own = super().qkv(config, source), head_part(config.num_kv_heads, source.ranks)
        if config.value_factor == 1.0:
            return qkv
        assert isinstance(qkv, Linear)
        return ScaledValues(qkv, (own.stop - own.start) * config.value_dim, config.value_factor)


class MiMoV2Flash(Llama):
    layer = MiMoV2FlashLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = _with_transformers_names(file)
        for name, values in _GIVEN.items():
            file.require_absent(name, *values)
        for name in _SAME:
            file.require_absent(f"swa_{name}", file.count(name))
        layers, experts = file.count("num_hidden_layers"), file.count("n_routed_experts", 256)
        windows, kv_heads = _windows(file, layers), file.count("num_key_value_heads")
        window_kv_heads = file.count("swa_num_key_value_heads", 2 * kv_heads)
        rope, window_rope = _ropes(file)
        config = read_llama_config(
            MiMoV2FlashConfig,
            # The cache has no room for heads that no layer has.
            ConfigFile({**file.fields, "num_key_value_heads": window_kv_heads if any(windows) else kv_heads}),
            Defaults(_CONTEXT, rms_norm_eps=1e-5),
            windows,
            rope=rope,
            window_rope=window_rope,
            qkv_bias=file.flag("attention_bias"),
            full_kv_heads=kv_heads if None in windows else window_kv_heads,
            value_dim=_value_dim(file),
            value_factor=file.number("attention_value_scale"),
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size", 2048),
            routing=read_grouped_routing(
                file, experts, 8, sigmoid=True, normalize=file.flag("norm_topk_prob", True), group_best=2
            ),
            dense_layers=read_layers_without_experts(file, layers, 1),
        )
        return msgspec.structs.replace(config, attention=_with_sinks(file, config.attention))


def _with_transformers_names(file: ConfigFile) -> ConfigFile:
    """Return the config with transformers' names of the fields that the authors' own code calls otherwise, and with
    transformers' defaults."""
    # An explicit null means that values have no factor.
    factor = 1.0 if "attention_value_scale" in file.fields else 0.707
    file = file.with_defaults({**_DEFAULTS, "attention_value_scale": factor})
    layers = file.count("num_hidden_layers")
    renamed: dict[str, Any] = {}
    for name, own, kinds in (
        ("layer_types", "hybrid_layer_pattern", ("full_attention", "sliding_attention")),
        ("mlp_layer_types", "moe_layer_freq", ("dense", "sparse")),
    ):
        if name not in file.fields and own in file.fields:
            numbers = file.integers(own)
            if len(numbers) != layers or max(numbers) > 1:
                raise ConfigError(f"{own} in config.json is {numbers}; it must be 0 or 1 for each of {layers} layers")
            renamed[name] = [kinds[number] for number in numbers]
    if "layernorm_epsilon" in file.fields:
        renamed["rms_norm_eps"] = file.number("layernorm_epsilon")
    return ConfigFile({**file.fields, **renamed})


def _value_dim(file: ConfigFile) -> int:
    """Return the elements of a head's value."""
    dim = file.count("v_head_dim")
    if dim % 2:
        raise ConfigError(f"v_head_dim in config.json is {dim}; it must be even")
    return dim


def _windows(file: ConfigFile, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: where layer_types says so, or else in all but the first and every sixth one.

    sliding_window_size does not count the query itself, unlike sliding_window.
    """
    before = file.fields.get("sliding_window_size")
    window = file.count("sliding_window", 129) if before is None else file.count("sliding_window_size") + 1
    types = file.layer_types("layer_types", layers)
    if types is None:
        full = {0, *range(5, layers, 6)}
        types = ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _with_sinks(file: ConfigFile, attention: tuple[AttentionSpec, ...]) -> tuple[AttentionSpec, ...]:
    """Return the specs of all layers with the sinks that their kinds have."""
    full, window = file.flag("add_full_attention_sink_bias"), file.flag("add_swa_attention_sink_bias", True)
    return tuple(msgspec.structs.replace(spec, sinks=full if spec.window is None else window) for spec in attention)


def _ropes(file: ConfigFile) -> tuple[Rope, Rope]:
    """Return the rotations of layers without and with a window: in rope_parameters, or in the fields of the authors'
    own code."""
    given, context = file.part("rope_parameters"), file.count("max_position_embeddings", _CONTEXT)
    ropes = []
    for kind, own, theta in (("full_attention", "rope_theta", 5e6), ("sliding_attention", "swa_rope_theta", 1e4)):
        parameters = given.part(kind)
        # A rope that is scaled rotates whole heads unless a part is named.
        scaled = (parameters.fields.get("rope_type") or parameters.fields.get("type") or "default") != "default"
        partial = file.number("partial_rotary_factor", 1.0 if scaled else _PARTIAL)
        rope = partial_rope(parameters, file.number(own, theta), context, file, partial)
        rotated = rope.rotary_dim(file.count("head_dim"))
        if rotated % 2 or not rotated:
            raise ConfigError(
                f"partial_rotary_factor in config.json is {rope.partial}; it must rotate an even number of elements of "
                f"a head, this is {rotated}"
            )
        ropes.append(rope)
    return ropes[0], ropes[1]
