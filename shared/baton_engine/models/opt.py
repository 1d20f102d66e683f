"""OPT (Zhang et al., 2022) and Galactica (Taylor et al., 2022): learned positions, LayerNorms, an MLP of ReLUs.

OPT-350m has its norms after residual additions, none after the last layer, and embeddings that are smaller than hidden
states.
"""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.layers.embedding import Embedding, Head
from baton_engine.layers.linear import Linear
from baton_engine.layers.norm import NoNorm
from baton_engine.source import Source

from .layer_norm_llama import PlainMlpLayer, PostNorm, plain_mlp
from .llama import Defaults, LlamaConfig, llama_fields, read_llama_config
from .unrotated import NO_ROPE, UnrotatedConfig, WithLearnedPositions


class OptConfig(UnrotatedConfig, frozen=True, kw_only=True):
    embedding_size: int  # projections lead from it to hidden_size and back if they differ
    post_norm: bool  # norms follow the residual additions
    has_final_norm: bool  # after the last layer


class OptLayer(PlainMlpLayer):
    norms = ("self_attn_layer_norm", "final_layer_norm")
    output = "out_proj"

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        return plain_mlp(config, source, self.projections)


class OptPostNormLayer(PostNorm, OptLayer):
    pass


def _layer(config: OptConfig, *how: Any) -> OptLayer:
    return OptPostNormLayer(config, *how) if config.post_norm else OptLayer(config, *how)


class Opt(WithLearnedPositions):
    layer = staticmethod(_layer)
    final_norm, positions_name, offset = "final_layer_norm", "embed_positions", 2

    def __init__(self, config: OptConfig, source: Source, max_positions: int) -> None:
        super().__init__(config, source, max_positions)
        self.project_in: Linear | None = None
        if source.stage.is_first and config.embedding_size != config.hidden_size:
            inside = self.parts(source)[0]
            self.project_in = Linear(inside, ["project_in"], [config.hidden_size], config.embedding_size)

    def parts(self, source: Source) -> tuple[Source, Source]:
        # Some checkpoints were written from the model without its head, so their names lack the prefix "model.".
        inside = "model.decoder" if "model.decoder.embed_tokens.weight" in source else "decoder"
        return source.at(inside), source

    def make_embedding(self, config: LlamaConfig, source: Source) -> Embedding:
        assert isinstance(config, OptConfig)
        return Embedding(source, config.vocab_size, config.embedding_size)

    def make_norm(self, config: LlamaConfig, source: Source) -> Any:
        assert isinstance(config, OptConfig)
        return super().make_norm(config, source) if config.has_final_norm else NoNorm()

    def make_head(self, config: LlamaConfig, source: Source) -> Head:
        assert isinstance(config, OptConfig)
        made = super().make_head(config, source)
        if source.stage.is_last and config.embedding_size != config.hidden_size:
            inside = self.parts(source)[0]
            made.begin_with(Linear(inside, ["project_out"], [config.embedding_size], config.hidden_size))
        return made

    def embed(self, ctx: Context) -> torch.Tensor:
        x = self.embedding(ctx.ids)
        x = x if self.project_in is None else self.project_in(x)
        return x.add_(self.positions(ctx.positions))

    @classmethod
    def read_config(cls, file: ConfigFile) -> OptConfig:
        bias, affine = file.flag("enable_bias", True), file.flag("layer_norm_elementwise_affine", True)
        hidden, post_norm = file.count("hidden_size", 768), not file.flag("do_layer_norm_before", True)
        embedding_size = file.count("word_embed_proj_dim", hidden)
        file = llama_fields(
            file, "activation_function", hidden_size=("hidden_size", 768), num_hidden_layers=("num_hidden_layers", 12),
            num_attention_heads=("num_attention_heads", 12), intermediate_size=("ffn_dim", 3072),
        )  # fmt: skip
        return read_llama_config(
            OptConfig,
            ConfigFile({"vocab_size": 50272, **file.fields}),
            Defaults(2048, tie_word_embeddings=True),
            eps=1e-5,
            rope=NO_ROPE,
            activation="relu",
            norm_weight=affine,
            norm_bias=affine,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            embedding_size=embedding_size,
            post_norm=post_norm,
            # Models that early versions of transformers fine-tuned lack it.
            has_final_norm=not (post_norm or file.flag("_remove_final_layer_norm")),
        )
