"""OPT (Zhang et al., 2022) and Galactica (Taylor et al., 2022): learned positions, LayerNorms, an MLP of ReLUs."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.source import Source

from .layer_norm_llama import PlainMlpLayer, plain_mlp
from .llama import Defaults, LlamaConfig, llama_fields, read_llama_config
from .unrotated import NO_ROPE, UnrotatedConfig, WithLearnedPositions


class OptLayer(PlainMlpLayer):
    norms = ("self_attn_layer_norm", "final_layer_norm")
    output = "out_proj"

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        return plain_mlp(config, source, self.projections)


class Opt(WithLearnedPositions):
    layer = OptLayer
    final_norm, positions_name, offset = "final_layer_norm", "embed_positions", 2

    def parts(self, source: Source) -> tuple[Source, Source]:
        # Some checkpoints were written from within the model.
        inside = "model.decoder" if "model.decoder.embed_tokens.weight" in source else "decoder"
        return source.at(inside), source

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        # OPT-350m, and fine-tuned models of early versions of transformers.
        file.require_absent("do_layer_norm_before", True)
        file.require_absent("_remove_final_layer_norm", False)
        file.require_absent("word_embed_proj_dim", file.count("hidden_size", 768))
        bias, affine = file.flag("enable_bias", True), file.flag("layer_norm_elementwise_affine", True)
        file = llama_fields(
            file, "activation_function", hidden_size=("hidden_size", 768), num_hidden_layers=("num_hidden_layers", 12),
            num_attention_heads=("num_attention_heads", 12), intermediate_size=("ffn_dim", 3072),
        )  # fmt: skip
        return read_llama_config(
            UnrotatedConfig,
            ConfigFile({"vocab_size": 50272, **file.fields}),
            Defaults(2048, tie_word_embeddings=True),
            eps=1e-5,
            rope=NO_ROPE,
            activations={"relu": "relu", "gelu": "gelu"},
            norm_weight=affine,
            norm_bias=affine,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
        )
