"""GLM-4 9B of 2024 (GLM Team): Llama with a fused gate, half of each head rotated in pairs of neighbours."""

from baton_engine.config_file import ConfigFile
from baton_engine.layers.linear import Linear
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .phi3 import fused_gate_up

_CONTEXT = 131072


class GlmLayer(LlamaLayer):
    def gate_up(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_gate_up(config, source)


class Glm(Llama):
    layer = GlmLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        context = file.count("max_position_embeddings", _CONTEXT)
        return read_llama_config(
            LlamaConfig,
            file,
            Defaults(_CONTEXT, num_kv_heads=2, head_dim=128, rms_norm_eps=1.5625e-07),
            rope=read_rope(file, context, partial=0.5, interleaved=True),
            qkv_bias=file.flag("attention_bias", True),
        )
