"""EXAONE 3.0, 3.5 and Deep (LG AI Research, 2024 and 2025): Llama with other names."""

from baton_engine.config_file import ConfigFile
from baton_engine.source import Source

from .llama import SILU, Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config


class ExaoneLayer(LlamaLayer):
    blocks = ("attn.attention", "mlp")
    norms = ("ln_1", "ln_2")
    output = "out_proj"
    gates, down = ("c_fc_0", "c_fc_1"), "c_proj"


class Exaone(Llama):
    layer = ExaoneLayer
    embedding_name, layers_name, final_norm = "wte", "h", "ln_f"

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("transformer"), source

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        sizes = {
            "num_hidden_layers": file.count("num_layers", file.count("num_hidden_layers", 32)),
            "intermediate_size": file.count("intermediate_size", 4 * file.count("hidden_size")),
        }
        return read_llama_config(
            LlamaConfig,
            ConfigFile({**file.fields, **sizes, "hidden_act": file.fields.get("activation_function")}),
            Defaults(2048, tie_word_embeddings=True),
            activations=SILU,
            eps=file.number("layer_norm_epsilon", 1e-5),
        )
