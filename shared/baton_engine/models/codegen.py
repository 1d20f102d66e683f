"""CodeGen (Nijkamp et al., 2023): GPT-J with one matrix for queries, keys and values."""

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.linear import Linear
from baton_engine.source import Source

from .gptj import GptJ, GptJLayer
from .llama import LlamaConfig, fused_qkv

# The matrix has one part, with some of the heads, for each processor on which the models were trained.
_PARTS = 4


class CodeGenLayer(GptJLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        # Each part has queries, then values, then keys.
        outputs = torch.arange(3 * config.hidden_size).view(_PARTS, 3, -1)
        order: list[int] = torch.cat([outputs[:, kind].flatten() for kind in (0, 2, 1)]).tolist()
        return fused_qkv(config, source, "qkv_proj", order)


class CodeGen(GptJ):
    layer = CodeGenLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        config = super().read_config(file)
        if config.num_heads % _PARTS:
            raise ConfigError(f"n_head in config.json is {config.num_heads}; it must be a multiple of {_PARTS}")
        return config
