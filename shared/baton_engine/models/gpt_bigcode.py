"""SantaCoder and StarCoder (Li et al., 2023): GPT-2 whose heads share one key and one value."""

import msgspec

from baton_engine.config_file import ConfigFile
from baton_engine.layers.fused_qkv import order_by_kv_head
from baton_engine.layers.linear import Linear
from baton_engine.source import Source

from .gpt2 import Gpt2
from .gpt2_names import Gpt2NamedLayer
from .llama import LlamaConfig, fused_qkv


class GptBigCodeLayer(Gpt2NamedLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        heads, kv_heads = config.num_heads, config.num_kv_heads
        return fused_qkv(config, source, "c_attn", order_by_kv_head(heads, kv_heads, config.head_dim))


class GptBigCode(Gpt2):
    layer = GptBigCodeLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        config = super().read_config(file)
        return msgspec.structs.replace(config, num_kv_heads=1) if file.flag("multi_query", True) else config
