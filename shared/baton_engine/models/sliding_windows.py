"""Reads from config.json which layers of a model have a sliding window, and how layers rotate."""

from typing import Any, Self

import msgspec

from baton_engine.attention_spec import AttentionSpec
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope, parse_layer_rope


class WithWindowRope:
    """A part of the config of a model whose layers with a window have a rope of their own.

    rope: of layers without a window. window_rope: of the others.
    """

    attention: tuple[AttentionSpec, ...]
    rope: Rope
    window_rope: Rope

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if self.attention[layer].window is None else self.window_rope

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "window_rope": self.window_rope.layout}  # type: ignore[misc]

    def limited(self, max_positions: int) -> Self:
        whole: Any = super().limited(max_positions)  # type: ignore[misc]
        limited: Self = msgspec.structs.replace(whole, window_rope=self.window_rope.limited(max_positions))
        return limited


def same_window(file: ConfigFile) -> tuple[int | None, ...]:
    """Return the window of each layer, for families in which all have sliding_window, or none if it is absent."""
    window = None if file.fields.get("sliding_window") is None else file.count("sliding_window")
    return (window,) * file.count("num_hidden_layers")


def optional_windows(file: ConfigFile, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, for the families that have windows only where use_sliding_window is set.

    layer_types names the layers that have one. Without that field, the layers from max_window_layers on have one.
    """
    return windows_from(file, layers, 28) if file.flag("use_sliding_window") else (None,) * layers


def windows_from(file: ConfigFile, layers: int, first: int) -> tuple[int | None, ...]:
    """As optional_windows, for families that have windows unless sliding_window is null. first: the default of
    max_window_layers."""
    # An explicit null turns windows off, unlike an absent field.
    if file.fields.get("sliding_window", 0) is None:
        return (None,) * layers
    window = file.count("sliding_window", 4096)
    types = file.layer_types("layer_types", layers)
    if types is None:
        first = file.integer("max_window_layers", first)
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def windows_in_turn(file: ConfigFile, layers: int, pattern: int, window: int = 4096) -> tuple[int | None, ...]:
    """Return the window of each layer, for families in which most layers have one.

    layer_types names the layers that have one. Without that field, all but every sliding_window_pattern-th have one.
    pattern, window: the family's defaults. An explicit null of sliding_window turns windows off.
    """
    if file.fields.get("sliding_window", 0) is None:
        return (None,) * layers
    window = file.count("sliding_window", window)
    types = file.layer_types("layer_types", layers)
    if types is None:
        pattern = file.count("sliding_window_pattern", pattern)
        types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def ropes_by_window(file: ConfigFile, context: int, theta: float, window_theta: float) -> tuple[Rope, Rope]:
    """Return the rotations of layers without and with a window.

    The newer form of config.json has rope_parameters by kind of layer. The older one has rope_theta and rope_scaling
    for layers without a window; layers with one are never scaled. theta, window_theta: where config.json has none.
    """
    given = file.fields.get("rope_parameters") or {}
    by_kind = given if "full_attention" in given or "sliding_attention" in given else {}
    full = by_kind.get("full_attention") or {**(file.fields.get("rope_scaling") or {}), **({} if by_kind else given)}
    window = by_kind.get("sliding_attention") or {}
    return parse_layer_rope(full, theta, context, file), parse_layer_rope(window, window_theta, context, file)


def partial_rope(given: ConfigFile, theta: float, context: int, file: ConfigFile, partial: float = 1.0) -> Rope:
    """Return the rotation of the layers of one kind, which may be of a part of each head.

    given: the parameters of this kind. theta, partial: where they have none. context, file: the model's longest context
    in tokens, and its config.json. Raises ConfigError unless the part is above 0 and at most 1.
    """
    partial = given.number("partial_rotary_factor", partial)
    if not 0 < partial <= 1:
        raise ConfigError(f"partial_rotary_factor in config.json is {partial}; it must be above 0 and at most 1")
    return msgspec.structs.replace(parse_layer_rope(given.fields, theta, context, file), partial=partial)
