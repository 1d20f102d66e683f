"""Reads from config.json which layers of a model have a sliding window."""

from baton_engine.config_file import ConfigFile


def optional_windows(file: ConfigFile, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, for the families that have windows only where use_sliding_window is set.

    layer_types names the layers that have one. Without that field, the layers from max_window_layers on have one.
    """
    # An explicit null turns windows off, unlike an absent field.
    if not file.flag("use_sliding_window") or file.fields.get("sliding_window", 0) is None:
        return (None,) * layers
    window = file.count("sliding_window", 4096)
    types = file.layer_types("layer_types", layers)
    if types is None:
        first = file.integer("max_window_layers", 28)
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)
