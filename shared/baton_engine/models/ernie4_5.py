"""ERNIE 4.5 and the text part of PaddleOCR-VL (Baidu, 2025): Llama, the former with pairs of neighbours rotated."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.rope import read_rope

from .llama import Defaults, Llama, LlamaConfig, read_llama_config

THETA, CONTEXT = 500000.0, 131072


class Ernie45(Llama):
    interleaved = True

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        bias, context = file.flag("use_bias"), file.count("max_position_embeddings", CONTEXT)
        return read_llama_config(
            LlamaConfig,
            file,
            Defaults(CONTEXT, num_kv_heads=2, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=True),
            rope=read_rope(file, context, theta=THETA, interleaved=cls.interleaved),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
        )


class PaddleOcr(Ernie45):
    interleaved = False
