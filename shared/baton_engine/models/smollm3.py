"""SmolLM3 (Hugging Face, 2025): Llama without rotation in some layers."""

from typing import Any

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope

from .llama import Defaults, Llama, LlamaConfig, read_llama_config


class SmolLm3Config(LlamaConfig, frozen=True, kw_only=True):
    rotating: tuple[bool, ...]  # of each layer

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "rotating": list(self.rotating)}

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope if self.rotating[layer] else None


class SmolLm3(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> SmolLm3Config:
        layers, bias = file.count("num_hidden_layers"), file.flag("attention_bias")
        return read_llama_config(
            SmolLm3Config,
            file,
            Defaults(32768, num_kv_heads=4, tie_word_embeddings=True, rope_theta=2e6),
            _windows(file, layers),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=file.flag("mlp_bias"),
            rotating=read_rotating(file, layers),
        )


def _windows(file: ConfigFile, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer: where layer_types says so. Without that field, the layers that do not rotate
    have one if use_sliding_window is set."""
    types, used = file.layer_types("layer_types", layers), file.flag("use_sliding_window")
    if types is None:
        used = used and file.fields.get("sliding_window") is not None
        windowed = [used and not rotates for rotates in read_rotating(file, layers)]
    else:
        windowed = [kind == "sliding_attention" for kind in types]
    return tuple(file.count("sliding_window") if has_one else None for has_one in windowed)


def read_rotating(file: ConfigFile, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it rotates: whether no_rope_layers has a 1 for it. Without that field, all layers
    but every no_rope_layer_interval-th rotate."""
    given = file.fields.get("no_rope_layers")
    if given is None:
        interval = file.count("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(given, list) or len(given) != layers or not all(entry in (0, 1) for entry in given):
        raise ConfigError(f"no_rope_layers in config.json must be a list of 0 or 1, one for each of {layers} layers")
    return tuple(map(bool, given))
