"""What the checkpoints and configs of GPT-2 call their parts, and those of families after it."""

from typing import Any

from baton_engine.config_file import ConfigFile
from baton_engine.source import Source

from .layer_norm_llama import LayerNormLlama, PlainMlpLayer
from .llama import Defaults, Kind, llama_fields, read_llama_config


class Gpt2NamedLayer(PlainMlpLayer):
    blocks = ("attn", "mlp")
    norms = ("ln_1", "ln_2")
    output = "c_proj"
    projections = ("c_fc", "c_proj")


class Gpt2Named(LayerNormLlama):
    embedding_name, layers_name, final_norm = "wte", "h", "ln_f"

    def parts(self, source: Source) -> tuple[Source, Source]:
        # The first checkpoints were written from within the model.
        return source.at("transformer") if "transformer.wte.weight" in source else source, source


def gpt2_fields(file: ConfigFile, hidden: int, layers: int, heads: int, context: int) -> ConfigFile:
    """Return a config.json with Llama's names for GPT-2's sizes. hidden, layers, heads, context: their defaults."""
    file = llama_fields(
        file, "activation_function", hidden_size=("n_embd", hidden), num_hidden_layers=("n_layer", layers),
        num_attention_heads=("n_head", heads), max_position_embeddings=("n_positions", context),
    )  # fmt: skip
    return ConfigFile({**file.fields, "intermediate_size": file.count("n_inner", 4 * file.count("hidden_size"))})


def read_gpt2_like(
    kind: type[Kind],
    file: ConfigFile,
    vocab: int,
    defaults: Defaults,
    windows: tuple[int | None, ...] | None = None,
    **facts: Any,
) -> Kind:
    """Return the config of a config.json with Llama's names for sizes and GPT-2's for the rest. vocab: the default of
    vocab_size. The rest as in read_llama_config."""
    return read_llama_config(
        kind,
        ConfigFile({"vocab_size": vocab, **file.fields}),
        defaults,
        windows,
        eps=file.number("layer_norm_epsilon", 1e-5),
        activation="gelu_new",
        mlp_bias=True,
        **facts,
    )
