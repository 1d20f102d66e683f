"""openPangu Embedded (Huawei, 2025): Llama with biases of attention."""

from baton_engine.config_file import ConfigFile

from .llama import Defaults, Llama, LlamaConfig, read_llama_config


class PanguEmbedded(Llama):
    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias, defaults = file.flag("bias", True), Defaults(32768, 8, rms_norm_eps=1e-5, rope_theta=16e6)
        return read_llama_config(LlamaConfig, file, defaults, qkv_bias=bias, output_bias=bias)
