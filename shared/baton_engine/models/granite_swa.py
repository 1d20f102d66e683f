"""Granite Swash (IBM, 2026), with experts or without: Granite with windows in three of four layers, sinks, and maybe a
rope of its own for each layer."""

from typing import Any

import msgspec

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import JoinedForm
from baton_engine.layers.rope import Rope

from .granite import Granite, GraniteConfig, read_granite_config
from .granitemoe import GraniteMoe, GraniteMoeConfig, GraniteMoeLayer, read_granite_moe_config
from .llama import LlamaConfig

# Those of transformers' configuration class of models without experts.
_DEFAULTS = {
    "max_position_embeddings": 8192, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


class _Ropes:
    """A part of the config. thetas: of the rope of each layer, 0 = the layer does not rotate; empty = all have that of
    rope."""

    rope: Rope
    thetas: tuple[float, ...]

    def rope_of(self, layer: int) -> Rope | None:
        theta = self.thetas[layer] if self.thetas else self.rope.theta
        return msgspec.structs.replace(self.rope, theta=theta) if theta else None

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "thetas": list(self.thetas)}  # type: ignore[misc]


class GraniteSwaConfig(_Ropes, GraniteConfig, frozen=True, kw_only=True):
    thetas: tuple[float, ...]


class GraniteMoeSwaConfig(_Ropes, GraniteMoeConfig, frozen=True, kw_only=True):
    thetas: tuple[float, ...]


class GraniteSwa(Granite):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        facts = _facts(file)
        return read_granite_config(
            GraniteSwaConfig, file.with_defaults(_DEFAULTS), mlp_bias=file.flag("mlp_bias"), **facts
        )


class GraniteMoeSwaLayer(GraniteMoeLayer):
    router, form = "router", JoinedForm("experts.gate_up_proj", "experts.down_proj", apart="experts")


class GraniteMoeSwa(GraniteMoe):
    layer = GraniteMoeSwaLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return read_granite_moe_config(GraniteMoeSwaConfig, file, **_facts(file))


def _facts(file: ConfigFile) -> dict[str, Any]:
    """Return what Granite 3 has for none of its layers."""
    layers, window = file.count("num_hidden_layers"), file.count("sliding_window", 128)
    types = file.layer_types("layer_types", layers) or [
        "sliding_attention" if layer % 4 else "full_attention" for layer in range(layers)
    ]
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return {"windows": windows, "sinks": True, "thetas": read_thetas(file, layers)}


def read_thetas(file: ConfigFile, layers: int) -> tuple[float, ...]:
    """Return layer_rope_theta: that of each layer, 0 = the layer does not rotate; empty when the field is absent."""
    given = file.fields.get("layer_rope_theta") or []
    numbers = isinstance(given, list) and all(isinstance(theta, int | float) and theta >= 0 for theta in given)
    if not numbers or len(given) not in (0, layers):
        raise ConfigError(
            f"layer_rope_theta in config.json is {given!r}; it must be a list of numbers of at least 0, one for each "
            f"of {layers} layers"
        )
    return tuple(map(float, given))
