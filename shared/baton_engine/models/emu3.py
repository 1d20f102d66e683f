"""The text part of Emu3 (BAAI, 2024): Llama with other defaults. Its vocabulary also has the tokens of images."""

from typing import Any

from baton_engine.config_file import ConfigFile

from .llama import Defaults, Llama, LlamaConfig, read_llama_config

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 184622, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "eos_token_id": 151850,
}  # fmt: skip


class Emu3(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias, mlp_bias = file.flag("attention_bias"), file.flag("mlp_bias")
        return read_llama_config(
            LlamaConfig,
            file.with_defaults(_DEFAULTS),
            Defaults(9216, rms_norm_eps=1e-5, rope_theta=1e6),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=mlp_bias,
        )
