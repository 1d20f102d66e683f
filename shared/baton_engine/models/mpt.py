"""MPT (MosaicML, 2023): positions by ALiBi, LayerNorms without biases, maybe with limits of q, k and v."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.layers.limited import Limited
from baton_engine.source import Source

from .bloom import with_alibi
from .layer_norm_llama import LayerNormLlama, PlainMlpLayer
from .llama import Defaults, LlamaConfig, fused_qkv, llama_fields, read_llama_config
from .unrotated import NO_ROPE, UnrotatedConfig


class MptConfig(UnrotatedConfig, frozen=True, kw_only=True):
    limit: float  # of the absolute values of queries, keys and values; 0 = none


class MptLayer(PlainMlpLayer):
    blocks = ("attn", "ffn")
    norms = ("norm_1", "norm_2")
    output = "out_proj"
    projections = ("up_proj", "down_proj")

    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, MptConfig)
        qkv = fused_qkv(config, source, "Wqkv")
        return Limited(qkv, config.limit) if config.limit else qkv


class Mpt(LayerNormLlama):
    layer = MptLayer
    embedding_name, layers_name, final_norm = "wte", "blocks", "norm_f"

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("transformer"), source

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        attention = file.part("attn_config")
        for name, value in (("no_bias", True), ("expansion_ratio", 4), ("logit_scale", None)):
            file.require_absent(name, value)
        file.choice("norm_type", "low_precision_layernorm", ("low_precision_layernorm", "layernorm"))
        attention.require_absent("attn_type", "multihead_attention")
        attention.require_absent("alibi", True)
        for name in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
            attention.require_absent(name, False)
        file = llama_fields(
            file, hidden_size=("d_model", 2048), num_hidden_layers=("n_layers", 24),
            num_attention_heads=("n_heads", 16), max_position_embeddings=("max_seq_len", 2048),
        )  # fmt: skip
        config = read_llama_config(
            MptConfig,
            ConfigFile({"vocab_size": 50368, **file.fields, "intermediate_size": 4 * file.count("hidden_size")}),
            Defaults(2048, tie_word_embeddings=True),
            scale=None if attention.fields.get("softmax_scale") is None else attention.number("softmax_scale"),
            eps=file.number("layer_norm_epsilon", 1e-5),
            rope=NO_ROPE,
            activation="gelu",
            activations={"gelu": "gelu"},
            norm_bias=False,
            limit=attention.number("clip_qkv", 0.0),
        )
        return with_alibi(config, attention.number("alibi_bias_max", 8.0))
