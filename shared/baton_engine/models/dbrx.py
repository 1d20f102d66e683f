"""DBRX (Databricks, 2024): LayerNorms without biases, limits of q, k and v, and sixteen experts."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import JoinedForm
from baton_engine.layers.experts import ExpertMlp, Router, load_joined_experts
from baton_engine.layers.limited import Limited
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .layer_norm_llama import LayerNormLayer, LayerNormLlama, SparseLayerNormConfig
from .llama import Defaults, LlamaConfig, fused_qkv, llama_fields, read_llama_config

_FORM = JoinedForm("w1", "w2", up="v1", flat=True)


class DbrxConfig(SparseLayerNormConfig, frozen=True, kw_only=True):
    limit: float  # of the absolute values of queries, keys and values; 0 = none


class DbrxLayer(LayerNormLayer):
    blocks = ("norm_attn_norm.attn", "ffn")
    norms = ("norm_attn_norm.norm_1", "norm_attn_norm.norm_2")
    output = "out_proj"

    def qkv(self, config: LlamaConfig, source: Source) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, DbrxConfig)
        qkv = fused_qkv(config, source, "Wqkv")
        return Limited(qkv, config.limit) if config.limit else qkv

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, DbrxConfig)
        source, experts, hidden = self.block(source, 1), config.num_experts, config.hidden_size
        router = Router(source.at("router.layer"), config.routing, experts, hidden)
        form = _FORM.gated(config.activation)
        held = load_joined_experts(source.at("experts.mlp"), experts, hidden, config.expert_size, form)
        return ExpertMlp(router, held, source.ranks)


class Dbrx(LayerNormLlama):
    layer = DbrxLayer
    embedding_name, layers_name, final_norm = "wte", "blocks", "norm_f"

    def parts(self, source: Source) -> tuple[Source, Source]:
        return source.at("transformer"), source

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        attention, ffn = (file.part(name) for name in ("attn_config", "ffn_config"))
        ffn.require_absent("moe_normalize_expert_weights", 1)
        file = llama_fields(
            file, hidden_size=("d_model", 2048), num_hidden_layers=("n_layers", 24),
            num_attention_heads=("n_heads", 16), max_position_embeddings=("max_seq_len", 2048),
        )  # fmt: skip
        experts, size = ffn.count("moe_num_experts", 4), ffn.count("ffn_hidden_size", 3584)
        own = {
            "num_key_value_heads": attention.count("kv_n_heads", 1), "intermediate_size": size,
            "hidden_act": ffn.part("ffn_act_fn").fields.get("name"),
        }  # fmt: skip
        # An explicit null leaves the weights as they are, unlike an absent field.
        normalize = ffn.fields.get("moe_normalize_expert_weights", 1) is not None
        return read_llama_config(
            DbrxConfig,
            ConfigFile({"vocab_size": 32000, **file.fields, **own}),
            Defaults(2048),
            eps=1e-5,
            rope=read_rope(file, file.count("max_position_embeddings"), theta=attention.number("rope_theta", 10000.0)),
            norm_bias=False,
            num_experts=experts,
            expert_size=size,
            routing=Routing(ffn.at_most("moe_top_k", experts, 1), normalize=normalize),
            limit=attention.number("clip_qkv", 0.0),
        )
