"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al., 2023): attention and MLP in parallel after one LayerNorm, biases."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope

from .layer_norm_llama import LayerNormConfig, LayerNormLlama, PlainMlpLayer
from .llama import Defaults, LlamaConfig, read_llama_config


class PhiLayer(PlainMlpLayer):
    output = "dense"


class Phi(LayerNormLlama):
    layer = PhiLayer
    final_norm = "final_layernorm"
    head_bias = True

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("qk_layernorm", False)
        # A tied head would have a bias beside the weights of the embedding.
        file.require_absent("tie_word_embeddings", False)
        return read_llama_config(
            LayerNormConfig,
            file,
            Defaults(2048),
            eps=file.number("layer_norm_eps", 1e-5),
            rope=read_rope(file, file.count("max_position_embeddings", 2048), partial=0.5),
            activation="gelu_new",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            parallel=True,
            two_norms=False,
        )
