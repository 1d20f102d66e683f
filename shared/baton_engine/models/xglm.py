"""XGLM (Lin et al., "Few-shot Learning with Multilingual Language Models", 2022): OPT with sinusoids as positions."""

import torch
from torch.nn import functional

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.embedding import sinusoids
from baton_engine.source import Source

from .layer_norm_llama import LayerNormLlama
from .llama import Defaults, LlamaConfig, llama_fields, read_llama_config
from .opt import OptLayer
from .unrotated import NO_ROPE, ScaledConfig

_OFFSET = 2  # the number of the first position


class XglmConfig(ScaledConfig, frozen=True, kw_only=True):
    padding: int | None  # the number of the position whose vector is 0; None = no position's is


class Xglm(LayerNormLlama):
    layer = OptLayer
    final_norm = "layer_norm"

    def __init__(self, config: XglmConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        table = sinusoids(max_positions, config.hidden_size, _OFFSET)
        # transformers takes the token of padding for the position of this number.
        if config.padding is not None and 0 <= config.padding - _OFFSET < max_positions:
            table[config.padding - _OFFSET] = 0.0
        self.positions = table.to(dtype=source.dtype, device=source.device)
        self.scale = config.hidden_size**0.5 if config.scaled else 1.0

    def embed(self, ctx: Context) -> torch.Tensor:
        return super().embed(ctx).mul_(self.scale).add_(functional.embedding(ctx.positions, self.positions))

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.require_absent("add_cross_attention", False)
        file = llama_fields(
            file, "activation_function", hidden_size=("d_model", 1024), num_hidden_layers=("num_layers", 24),
            num_attention_heads=("attention_heads", 16), intermediate_size=("ffn_dim", 4096),
        )  # fmt: skip
        return read_llama_config(
            XglmConfig,
            ConfigFile({"vocab_size": 256008, **file.fields}),
            Defaults(2048, tie_word_embeddings=True),
            eps=1e-5,
            rope=NO_ROPE,
            activation="gelu",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            scaled=file.flag("scale_embedding", True),
            padding=None if file.fields.get("pad_token_id", 1) is None else file.integer("pad_token_id", 1),
        )
