"""GPT-J (Wang and Komatsuzaki, 2021): attention and MLP in parallel after one LayerNorm, a part of each head rotated in
pairs of neighbours."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import Rope, fraction_of
from baton_engine.source import Source

from .layer_norm_llama import LayerNormConfig, LayerNormLlama, PlainMlpLayer
from .llama import Defaults, LlamaConfig, llama_fields, read_llama_config

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


class GptJLayer(PlainMlpLayer):
    blocks = ("attn", "mlp")
    norms = ("ln_1", "")
    output = "out_proj"
    projections = ("fc_in", "fc_out")


class GptJ(LayerNormLlama):
    layer = GptJLayer
    embedding_name, layers_name, final_norm, head_bias = "wte", "h", "ln_f", True

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("transformer"), source

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # A tied head would have a bias beside the weights of the embedding.
        file.require_absent("tie_word_embeddings", False)
        file.require_absent("scale_attn_weights", True)
        file = llama_fields(
            file, "activation_function", hidden_size=("n_embd", 4096), num_hidden_layers=("n_layer", 28),
            num_attention_heads=("n_head", 16), max_position_embeddings=("n_positions", 2048),
        )  # fmt: skip
        hidden, heads = file.count("hidden_size"), file.count("num_attention_heads")
        dim = hidden // heads
        rotated = file.at_most("rotary_dim", dim, 64)
        inner = file.count("n_inner", 4 * hidden)
        return read_llama_config(
            LayerNormConfig,
            ConfigFile({"vocab_size": 50400, **file.fields, "intermediate_size": inner}),
            Defaults(2048),
            eps=file.number("layer_norm_epsilon", 1e-5),
            rope=Rope("default", 10000.0, partial=fraction_of(rotated, dim), interleaved=True),
            activations=_ACTIVATIONS,
            mlp_bias=True,
            parallel=True,
            two_norms=False,
        )
