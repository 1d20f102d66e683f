"""GPT (Radford et al., "Improving Language Understanding by Generative Pre-Training", 2018): GPT-2 with norms after
blocks instead of before them, and none after the last layer."""

from typing import Any

from baton_engine.config_file import ConfigFile
from baton_engine.layers.norm import NoNorm
from baton_engine.source import Source

from .gpt2 import Gpt2Layer
from .layer_norm_llama import PostNorm
from .llama import Defaults, LlamaConfig, llama_fields, read_llama_config
from .unrotated import NO_ROPE, UnrotatedConfig, WithLearnedPositions

_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


class OpenAiGptLayer(PostNorm, Gpt2Layer):
    pass


class OpenAiGpt(WithLearnedPositions):
    layer = OpenAiGptLayer
    embedding_name, layers_name, positions_name = "tokens_embed", "h", "positions_embed"

    def parts(self, source: Source) -> tuple[Source, Source]:
        # The first checkpoints were written from within the model.
        return source.at("transformer") if "transformer.tokens_embed.weight" in source else source, source

    def make_norm(self, config: LlamaConfig, source: Source) -> Any:
        return NoNorm()

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = llama_fields(
            file, "afn", hidden_size=("n_embd", 768), num_hidden_layers=("n_layer", 12),
            num_attention_heads=("n_head", 12), max_position_embeddings=("n_positions", 512),
        )  # fmt: skip
        inner = 4 * file.count("hidden_size")
        return read_llama_config(
            UnrotatedConfig,
            ConfigFile({"vocab_size": 40478, **file.fields, "intermediate_size": inner}),
            Defaults(512, tie_word_embeddings=True),
            eps=file.number("layer_norm_epsilon", 1e-5),
            rope=NO_ROPE,
            activation="gelu",
            activations=_ACTIVATIONS,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
        )
