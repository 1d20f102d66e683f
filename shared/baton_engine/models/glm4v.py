"""The text parts of GLM-4.1V, of GLM-4.5V, which has experts (GLM-V Team, 2025), and of GLM-OCR (2026)."""

from baton_engine.config_file import ConfigFile

from .glm4 import Glm4
from .glm4_moe import Glm4Moe
from .llama import LlamaConfig


class Glm4v(Glm4):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # transformers computes these for every model of the family.
        file.require_absent("attention_bias", True)
        dim = file.count("hidden_size") // file.count("num_attention_heads")
        file.require_absent("head_dim", dim)
        defaults = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
        return super().read_config(ConfigFile({**file.with_defaults(defaults).fields, "head_dim": dim}))


class Glm4vMoe(Glm4Moe):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("use_qk_norm", False)
        defaults = {"max_position_embeddings": 65536, "attention_bias": True}
        return super().read_config(file.with_defaults(defaults))


class GlmOcr(Glm4):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # transformers computes none for any model of the family.
        file.require_absent("attention_bias", False)
        defaults = {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "attention_bias": False,
            "head_dim": file.count("hidden_size") // file.count("num_attention_heads"),
        }  # fmt: skip
        return super().read_config(file.with_defaults(defaults))
