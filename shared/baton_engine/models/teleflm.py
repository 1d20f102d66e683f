"""Tele-FLM and FLM-2 (CofeAI and TeleAI, 2024): Llama with factors of embeddings and logits, with which a large model
is trained by the learning rates of a small one (Yao et al., "nanoLM", 2023)."""

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile

from .granite import Granite, GraniteConfig, Multipliers
from .llama import Defaults, LlamaConfig, LlamaLayer, read_llama_config

_FACTORS = ("input_mult", "output_mult", "mup_scale_factor")


class TeleFlm(Granite):
    layer = LlamaLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # The config class of the published code turns the factors on.
        used = file.flag("use_mup", True)
        embeddings, logits, width = (file.number(name, 1.0) if used else 1.0 for name in _FACTORS)
        if not logits or not width:
            raise ConfigError("output_mult and mup_scale_factor in config.json must not be 0")
        bias, mlp_bias = file.flag("attention_bias"), file.flag("mlp_bias")
        return read_llama_config(
            GraniteConfig, file, Defaults(4096), qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias,
            multipliers=Multipliers(embeddings, 1.0, width / logits),
        )  # fmt: skip
