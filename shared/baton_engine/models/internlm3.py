"""InternLM3 (InternLM Team, 2025): Llama with separate fields for the biases of queries, keys and values and for all
others."""

from baton_engine.config_file import ConfigFile

from .llama import SILU, Defaults, Llama, LlamaConfig, read_llama_config


class InternLm3(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias, defaults = file.flag("bias"), Defaults(32768, 32, tie_word_embeddings=True)
        return read_llama_config(
            LlamaConfig,
            file,
            defaults,
            activations=SILU,
            qkv_bias=file.flag("qkv_bias"),
            output_bias=bias,
            mlp_bias=bias,
        )
