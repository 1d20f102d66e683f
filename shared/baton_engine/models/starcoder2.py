"""StarCoder2 (Lozhkov et al., 2024): Llama with LayerNorms, biases and an MLP without gates."""

from baton_engine.config_file import ConfigFile

from .layer_norm_llama import LayerNormConfig, LayerNormLlama, PlainMlpLayer
from .llama import Defaults, LlamaConfig, read_llama_config
from .sliding_windows import same_window


class Starcoder2Layer(PlainMlpLayer):
    projections = ("c_fc", "c_proj")


class Starcoder2(LayerNormLlama):
    layer = Starcoder2Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias = file.flag("use_bias", True)
        return read_llama_config(
            LayerNormConfig,
            file,
            Defaults(4096, num_kv_heads=2, tie_word_embeddings=True),
            same_window(file),
            eps=file.number("norm_epsilon", 1e-5),
            activation="gelu_pytorch_tanh",
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
        )
