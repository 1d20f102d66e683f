"""Ling and Ring (Ling Team, "Every FLOP Counts", 2025, and "Every Activation Boosted", 2025): Llama with one matrix for
queries, keys and values, and with experts. Those of Ling 2.0 are chosen by sigmoids, within groups."""

from typing import Any

import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.embedding import Head
from baton_engine.layers.linear import Linear
from baton_engine.layers.rope import read_rope
from baton_engine.source import Source
from baton_kernels.reference.routing import Routing

from .deepseek_experts import DeepseekExpertsLayer, UncorrectedExpertsLayer
from .llama import SILU, Defaults, Llama, LlamaConfig, fused_qkv, read_llama_config
from .sparse_config import SparseConfig, read_experts_per_token, read_grouped_routing

# Those of the authors' configuration class of Ling 2.0.
_DEFAULTS = {
    "vocab_size": 157184, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
    "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1, "n_group": 8,
    "topk_group": 4, "moe_intermediate_size": 512, "eos_token_id": 156892,
}  # fmt: skip
# Those of the authors' configuration class of Sarvam 30B, where they differ from those of Ling 2.0.
_DEFAULTS_OF_SARVAM = {
    "vocab_size": 262144, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 19, "num_experts": 128,
    "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1024, "head_dim": 256,
    "routed_scaling_factor": 2.5, "max_position_embeddings": 4096, "rope_theta": 10000.0, "eos_token_id": 1,
}  # fmt: skip
# Fields of later models, with the values that change nothing in the first ones.
_OF_LATER_ONES: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False,), "use_qk_norm": (False,), "score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
}  # fmt: skip
# The values with which every model of Ling 2.0 is computed. Those of Ling 2.5 have other attention in most layers.
_GIVEN: dict[str, tuple[Any, ...]] = {
    "norm_topk_prob": (True,), "norm_head": (False,), "moe_router_enable_expert_bias": (True,),
    "layer_group_size": (1,), "use_sliding_window": (False,), "use_rmsnorm": (True,),
}  # fmt: skip
_TINY = 1e-7  # added to norms of the head


class BailingConfig(SparseConfig, frozen=True, kw_only=True):
    """norm_head: the head's weights for each hidden unit are divided by their norm over all tokens."""

    norm_head: bool = False


class BailingV2Layer(DeepseekExpertsLayer):
    blocks = ("attention", "mlp")
    output = "dense"
    head_norms = ("query_layernorm", "key_layernorm")

    def qkv(self, config: LlamaConfig, source: Source) -> Linear:
        return fused_qkv(config, source, "query_key_value")

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        return source.take("gate.expert_bias", (config.num_experts,), dtype=torch.float32)


class BailingLayer(UncorrectedExpertsLayer, BailingV2Layer):
    pass


class Bailing(Llama):
    layer = BailingLayer
    embedding_name = "word_embeddings"

    def make_head(self, config: Any, source: Source) -> Head:
        head = super().make_head(config, source)
        if config.norm_head and source.stage.is_last:
            weight = source.weight("lm_head", config.vocab_size, config.hidden_size)
            norms = torch.linalg.vector_norm(weight, dim=0, dtype=torch.float32) + _TINY
            head.begin_with(lambda hidden: (hidden / norms).to(hidden.dtype))
        return head

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        for name, values in _OF_LATER_ONES.items():
            file.require_absent(name, *values)
        norm_head = file.flag("norm_head")
        if norm_head and file.flag("tie_word_embeddings"):
            raise ConfigError("norm_head in config.json is not served with tie_word_embeddings")
        experts = file.count("num_experts", 16)
        chosen = read_experts_per_token(file, experts, 2)
        return read_llama_config(
            BailingConfig,
            file,
            # The default of the family's configuration class is 0 key-value heads, with which no model can run.
            Defaults(16384, num_kv_heads=file.count("num_key_value_heads"), rms_norm_eps=1e-5),
            activations=SILU,
            qkv_bias=file.flag("use_qkv_bias"),
            output_bias=file.flag("use_bias", True),
            # The weight of a lone expert is never divided by itself.
            routing=Routing(chosen, normalize=file.flag("norm_topk_prob", True) and chosen > 1),
            norm_head=norm_head,
            **_sizes(file, experts, 0, 0),
        )


class BailingV2(Llama):
    """The layers for multi-token prediction, which follow the others, are not read."""

    layer = BailingV2Layer
    embedding_name = "word_embeddings"

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        for name, values in _GIVEN.items():
            file.require_absent(name, *values)
        file.choice("score_function", "sigmoid", ("sigmoid",))
        file.require_absent("moe_shared_expert_intermediate_size", file.count("moe_intermediate_size"))
        experts, context = file.count("num_experts"), file.count("max_position_embeddings", 32768)
        return read_llama_config(
            SparseConfig,
            file,
            Defaults(32768, num_kv_heads=4, head_dim=128),
            activations=SILU,
            rope=read_rope(file, context, partial=1.0, theta=600000.0),
            qkv_bias=file.flag("use_qkv_bias"),
            output_bias=file.flag("use_bias"),
            qk_norm=file.flag("use_qk_norm", True),
            routing=read_grouped_routing(
                file, experts, 8, sigmoid=True, normalize=file.count("num_experts_per_tok") > 1, group_best=2
            ),
            **_sizes(file, experts, 1, 1),
        )


class SarvamMoe(BailingV2):
    """Sarvam 30B (Sarvam AI, 2026)."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        return super().read_config(file.with_defaults(_DEFAULTS_OF_SARVAM))


class Param2Moe(BailingV2):
    """Param 2 (BharatGen, 2026). Its config counts the hidden units of all experts together that all tokens use."""

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file, total = file.with_defaults(_DEFAULTS), "moe_shared_expert_intermediate_size"
        file.require_absent(total, file.integer("num_shared_experts") * file.count("moe_intermediate_size"))
        return super().read_config(ConfigFile({**file.fields, total: None}))


def _sizes(file: ConfigFile, experts: int, shared: int, dense: int) -> dict[str, Any]:
    """Return the sizes of experts, as SparseConfig has them. shared, dense: the defaults for the experts that all
    tokens use and for the first layers without experts."""
    size, layers = file.count("moe_intermediate_size"), file.count("num_hidden_layers")
    return {
        "num_experts": experts,
        "expert_size": size,
        "shared_size": file.integer("num_shared_experts", shared) * size,
        "dense_layers": frozenset(range(min(file.integer("first_k_dense_replace", dense), layers))),
    }
