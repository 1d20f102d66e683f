"""IQuest-Coder without loops (IQuest, 2026): Llama with other defaults."""

from baton_engine.config_file import ConfigFile

from .llama import Defaults, Llama, LlamaConfig, read_llama_config

_DEFAULTS = Defaults(16384, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0)


class IQuestCoder(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # No published model has limits or windows.
        file.require_absent("clip_qkv")
        file.require_absent("use_sliding_window", False)
        bias, mlp_bias = file.flag("attention_bias"), file.flag("mlp_bias")
        return read_llama_config(LlamaConfig, file, _DEFAULTS, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
