"""The text part of North Micro Vision (Cohere, 2026): Command A without interleaved rotation, with a rope for each kind
of layer."""

from typing import Any

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope, parse_layer_rope

from .cohere import Cohere, CohereConfig, read_cohere_config
from .llama import LlamaConfig
from .sliding_windows import WithWindowRope
from .unrotated import NO_ROPE

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "eos_token_id": 255001, "sliding_window": 4096,
}  # fmt: skip


class CohereCompassConfig(WithWindowRope, CohereConfig, frozen=True, kw_only=True):
    """rope, window_rope: NO_ROPE = layers of this kind do not rotate queries and keys."""

    window_rope: Rope

    def rope_of(self, layer: int) -> Rope | None:
        rope = super().rope_of(layer)
        return None if rope == NO_ROPE else rope


class CohereCompass(Cohere):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = ConfigFile({**_DEFAULTS, **file.fields})
        layers = file.count("num_hidden_layers")
        types = file.layer_types("layer_types", layers) or ["full_attention"] * layers
        window = file.count("sliding_window") if "sliding_attention" in types else None
        return read_cohere_config(
            CohereCompassConfig,
            # Unlike in Cohere's other models, logits are not scaled by default.
            ConfigFile({**file.fields, "logit_scale": file.number("logit_scale", 1.0)}),
            tuple(window if kind == "sliding_attention" else None for kind in types),
            rope=_rope(file, "full_attention", types),
            window_rope=_rope(file, "sliding_attention", types),
        )


def _rope(file: ConfigFile, kind: str, types: list[str]) -> Rope:
    """Return the rope of layers of a kind. Its parameters must be given, if only as null: transformers has no default
    for them."""
    given = file.part("rope_parameters")
    if kind not in types:
        return NO_ROPE
    if kind not in given.fields:
        raise ConfigError(f"rope_parameters in config.json has no {kind!r}")
    if given.fields[kind] is None:
        return NO_ROPE
    parameters = given.part(kind)
    parameters.require_absent("partial_rotary_factor", 1.0)
    context = file.count("max_position_embeddings", 8192)
    return parse_layer_rope(parameters.fields, parameters.number("rope_theta"), context, file)
