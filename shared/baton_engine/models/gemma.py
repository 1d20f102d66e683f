"""Gemma 1 and CodeGemma (Gemma Team, 2024): Llama with Gemma's norms, embeddings and gate."""

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.source import Source

from .llama import HIDDEN_ACTS, Defaults, Llama, LlamaConfig, read_llama_config


class Gemma(Llama):
    def __init__(self, config: LlamaConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.scale = torch.tensor(config.hidden_size**0.5, dtype=source.dtype, device=source.device)

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("use_bidirectional_attention", False)
        bias = file.flag("attention_bias")
        return read_llama_config(
            LlamaConfig,
            file,
            Defaults(8192, num_kv_heads=16, head_dim=256, tie_word_embeddings=True),
            # The first releases say gelu and mean its approximation.
            activation="gelu_pytorch_tanh",
            activations={**HIDDEN_ACTS, "gelu": "gelu_tanh"},
            norm_offset=1.0,
            qkv_bias=bias,
            output_bias=bias,
        )

    def embed(self, ctx: Context) -> torch.Tensor:
        return super().embed(ctx).mul_(self.scale)
