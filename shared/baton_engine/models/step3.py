"""Step 3 and its text part within a model that reads images (StepFun, "Step-3 is Large yet Affordable", 2025): Llama
with one key-value head, queries of low rank, and the experts of a layer in one tensor."""

from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config_file import ConfigFile
from baton_engine.experts_method import JoinedForm
from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_joined_experts
from baton_engine.layers.linear import Linear
from baton_engine.layers.low_rank_queries import LowRankQueries
from baton_engine.layers.norm import RmsNorm
from baton_engine.shard import Heads
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .llama import SILU, Defaults, Llama, LlamaConfig, LlamaLayer, read_llama_config
from .qwen2_moe import shared_expert
from .sparse_config import SparseConfig, read_experts_per_token
from .step3p5 import read_enumerated_layers

# Those of the authors' configuration class.
_DEFAULTS = {
    "vocab_size": 128815, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 64, "head_dim": 256, "share_q_dim": 2048, "share_expert_dim": 5120,
    "moe_intermediate_size": 5120, "moe_num_experts": 48, "moe_top_k": 3, "max_position_embedding": 65536,
}  # fmt: skip


class Step3Config(SparseConfig, frozen=True, kw_only=True):
    query_rank: int  # elements of the vector from which queries are computed


class Step3Layer(LlamaLayer):
    def qkv(self, config: LlamaConfig, source: Source) -> LowRankQueries:
        assert isinstance(config, Step3Config)
        hidden, rank, dim = config.hidden_size, config.query_rank, config.head_dim
        kv, shard = config.num_kv_heads * dim, Heads(source.ranks, dim)
        low = Linear(source, ["q_proj"], [rank], hidden)
        norm = RmsNorm(source.at("inter_norm"), rank, config.rms_norm_eps)
        queries = Linear(source, ["wq"], [config.num_heads * dim], rank, shard=shard)
        return LowRankQueries(low, norm, queries, Linear(source, ["k_proj", "v_proj"], [kv, kv], hidden, shard=shard))

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, Step3Config)
        if layer in config.dense_layers:
            return super().make_mlp(config, source, layer)
        inside, hidden, count, kind = source.at("moe"), config.hidden_size, config.num_experts, config.activation
        router = Router(inside.at("gate"), config.routing, count, hidden)
        form = JoinedForm("gate_proj.weight", "down_proj.weight", up="up_proj.weight", activation=kind, apart="experts")
        held = load_joined_experts(inside, count, hidden, config.expert_size, form)
        shared = shared_expert(source.at("share_expert"), config.shared_size, hidden, kind)
        return WithSharedExpert(ExpertMlp(router, held, source.ranks), shared, source.ranks)


class Step3(Llama):
    layer = Step3Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        # The authors' code normalizes no weights of experts, whatever this field says.
        file.require_absent("norm_expert_weight", False)
        file.require_absent("num_attention_groups", 1)
        layers, experts = file.count("num_hidden_layers"), file.count("moe_num_experts")
        names = {"max_position_embeddings": "max_position_embedding", "num_experts_per_tok": "moe_top_k"}
        given = ConfigFile({**file.fields, **{ours: file.fields[own] for ours, own in names.items()}})
        return read_llama_config(
            Step3Config,
            ConfigFile({**given.fields, "num_key_value_heads": 1}),
            Defaults(65536, rms_norm_eps=1e-5, rope_theta=500000.0),
            activations=SILU,
            query_rank=file.count("share_q_dim"),
            num_experts=experts,
            expert_size=file.count("moe_intermediate_size"),
            routing=Routing(read_experts_per_token(given, experts, 3)),
            shared_size=file.count("share_expert_dim"),
            dense_layers=read_enumerated_layers(file, layers, 1),
        )
