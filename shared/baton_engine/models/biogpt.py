"""BioGPT (Luo et al., 2022): OPT with embeddings that are multiplied by the square root of their size."""

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.source import Source

from .llama import Defaults, LlamaConfig, llama_fields, read_llama_config
from .opt import OptLayer
from .unrotated import NO_ROPE, ScaledConfig, WithLearnedPositions


class BioGpt(WithLearnedPositions):
    layer = OptLayer
    final_norm, positions_name, offset, head_name = "layer_norm", "embed_positions", 2, "output_projection"

    def __init__(self, config: ScaledConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.scale = config.hidden_size**0.5 if config.scaled else 1.0

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("biogpt"), source

    def embed(self, ctx: Context) -> torch.Tensor:
        return self.embedding(ctx.ids).mul_(self.scale).add_(self.positions(ctx.positions))

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = llama_fields(
            file, hidden_size=("hidden_size", 1024), num_hidden_layers=("num_hidden_layers", 24),
            num_attention_heads=("num_attention_heads", 16), intermediate_size=("intermediate_size", 4096),
        )  # fmt: skip
        return read_llama_config(
            ScaledConfig,
            ConfigFile({"vocab_size": 42384, **file.fields}),
            Defaults(1024, tie_word_embeddings=True),
            # transformers does not read layer_norm_eps.
            eps=1e-5,
            rope=NO_ROPE,
            activation="gelu",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            scaled=file.flag("scale_embedding", True),
        )
