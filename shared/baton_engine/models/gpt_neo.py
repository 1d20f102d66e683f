"""GPT-Neo (Black et al., 2021): GPT-2 with windows in every second layer and scores that are not scaled."""

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile

from .gpt2_names import Gpt2Named, Gpt2NamedLayer, read_gpt2_like
from .llama import Defaults, LlamaConfig, llama_fields
from .unrotated import NO_ROPE, UnrotatedConfig, WithLearnedPositions


class GptNeoLayer(Gpt2NamedLayer):
    blocks = ("attn.attention", "mlp")
    output = "out_proj"


class GptNeo(Gpt2Named, WithLearnedPositions):
    layer = GptNeoLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = llama_fields(
            file, "activation_function", hidden_size=("hidden_size", 2048), num_hidden_layers=("num_layers", 24),
            num_attention_heads=("num_heads", 16),
        )  # fmt: skip
        inner = file.count("intermediate_size", 4 * file.count("hidden_size"))
        return read_gpt2_like(
            UnrotatedConfig,
            ConfigFile({**file.fields, "intermediate_size": inner}),
            50257,
            Defaults(2048, tie_word_embeddings=True),
            _windows(file),
            scale=1.0,
            rope=NO_ROPE,
            output_bias=True,
        )


def _windows(file: ConfigFile) -> tuple[int | None, ...]:
    """Return the window of each layer: attention_types has lists of kinds, with how often each list is repeated."""
    layers, window = file.count("num_hidden_layers"), file.count("window_size", 256)
    given = file.fields.get("attention_types") or [[["global", "local"], 12]]
    try:
        # More kinds than layers are an error in any case, and a large number of them would fill the memory.
        kinds = [kind for repeated, times in given for _ in range(min(times, layers + 1)) for kind in repeated]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
        raise ConfigError(
            f"attention_types in config.json is {given!r}; it must name global or local for {layers} layers"
        )
    return tuple(window if kind == "local" else None for kind in kinds)
