"""DeepSeek-V2, V2-Lite and V2.5 (DeepSeek-AI, "DeepSeek-V2", 2024): latent attention, and experts in groups."""

from collections.abc import Callable
from typing import Any

import torch

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.latent_spec import LatentSpec
from baton_engine.layers.indexer import Selector
from baton_engine.layers.latent_attention import EPS, LatentAttention
from baton_engine.layers.position_scale import stepped_scales
from baton_engine.layers.rope import read_rope, yarn_scale
from baton_engine.source import Source

from .deepseek_experts import DeepseekExpertsLayer
from .llama import HIDDEN_ACTS, Llama, LlamaConfig
from .sparse_config import SparseConfig, read_grouped_routing, read_layers_between_experts


class DeepseekConfig(SparseConfig, frozen=True, kw_only=True):
    """latent: the attention of all layers. low_rank: of the queries; None = they are made of the hidden state.
    corrected: the router has a correction of its scores. interleaved: as in LatentAttention. growth: of queries, as in
    stepped_scales; 0 = none. latent_scale, latent_eps: as latent_scale and eps in LatentAttention."""

    latent: LatentSpec
    low_rank: int | None
    corrected: bool
    interleaved: bool
    growth: float = 0.0
    latent_scale: float = 1.0
    latent_eps: float = EPS

    @property
    def rotary_dim(self) -> int:
        return self.latent.rope_dim

    @property
    def projections(self) -> list[tuple[int, int]]:
        spec, heads, hidden = self.latent, self.num_heads, self.hidden_size
        queries = heads * spec.query_dim
        up = [] if self.low_rank is None else [(queries, self.low_rank)]
        expansion = heads * (spec.key_dim + spec.value_dim), spec.rank
        down = (self.low_rank or queries) + spec.latent_dim, hidden
        return [down, *up, expansion, (hidden, heads * spec.value_dim)]

    def pair_operations(self, decode: bool) -> int:
        return self.num_heads * self.latent.pair_operations(decode)

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "latent": [self.latent.rank, self.latent.rope_dim]}

    def kv_layout(self, dtype: str) -> KvLayout:
        windows = self.sliding_windows if any(self.sliding_windows) else ()
        return KvLayout(self.num_layers, (Plane("latent", 1, self.latent.latent_dim, dtype),), windows)


class DeepseekLayer(DeepseekExpertsLayer):
    """attention_class: what computes attention."""

    attention_class: type[LatentAttention] = LatentAttention

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[torch.Tensor, Context], torch.Tensor]:
        assert isinstance(config, DeepseekConfig)
        assert rotary is not None
        trained, scales = config.rope.original_max_position_embeddings, None
        if config.growth:
            scales = stepped_scales(trained, config.growth, len(rotary[0]), source.dtype, source.device)
        return self.attention_class(
            source, layer, config.latent, hidden=config.hidden_size, heads=config.num_heads, low_rank=config.low_rank,
            bias=config.qkv_bias, rotary=rotary, interleaved=config.interleaved, scales=scales,
            latent_scale=config.latent_scale, indexer=self.make_indexer(config, source, layer, rotary),
            output=self.output, eps=config.latent_eps,
        )  # fmt: skip

    def make_indexer(
        self, config: DeepseekConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> Selector | None:
        """Return the indexer of a layer, as in LatentAttention."""
        return None

    def correction(self, config: SparseConfig, source: Source) -> torch.Tensor | None:
        assert isinstance(config, DeepseekConfig)
        return super().correction(config, source) if config.corrected else None


# Those of transformers' configuration class.
DEFAULTS = {
    "max_position_embeddings": 2048,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "q_lora_rank": 1536,
}


class DeepseekV2(Llama):
    layer = DeepseekLayer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file.choice("scoring_func", "softmax", ("softmax",))
        method = file.choice("topk_method", "greedy", ("greedy", "group_limited_greedy"))
        # The authors' code divides the weights by their sum or scales them, and transformers always scales them.
        file.require_absent("norm_topk_prob", False)
        if method == "greedy":
            file = ConfigFile({**file.fields, "n_group": 1, "topk_group": 1})
        return read_deepseek_config(file, DEFAULTS, chosen=6)


def read_deepseek_config(
    file: ConfigFile, defaults: dict[str, Any], *, chosen: int, dense_layers: frozenset[int] | None = None,
    interleaved: bool = True, corrected: bool = False, growth: float = 0.0, rotated: bool = True, **how: Any,
) -> DeepseekConfig:  # fmt: skip
    """Return the config of a config.json with DeepSeek's fields.

    defaults: of fields that are absent. Some of them can also be null, which means something else. chosen: the family's
    default for the experts of a token. dense_layers: None = those that DeepSeek's fields name. rotated: keys have
    rotated elements. how: other fields of Routing.
    """
    file = ConfigFile({**defaults, **file.fields})
    activation = HIDDEN_ACTS[file.choice("hidden_act", "silu", tuple(HIDDEN_ACTS))]
    file.require_absent("mlp_bias", False)
    layers, heads = file.count("num_hidden_layers"), file.count("num_attention_heads")
    context = file.count("max_position_embeddings")
    experts, size = file.count("n_routed_experts"), file.count("moe_intermediate_size")
    if dense_layers is None:
        dense_layers = read_layers_between_experts(file, layers)
    spec, bias = _read_spec(file, rotated), file.flag("attention_bias")
    return DeepseekConfig(
        architecture=file.architecture,
        vocab_size=file.count("vocab_size"),
        hidden_size=file.count("hidden_size"),
        intermediate_size=file.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=spec.query_dim,
        max_position_embeddings=context,
        tie_word_embeddings=file.flag("tie_word_embeddings"),
        dtype=file.dtype,
        eos_token_ids=file.eos_token_ids,
        attention=(spec,) * layers,
        rms_norm_eps=file.number("rms_norm_eps", 1e-6),
        rope=read_rope(file, context),
        activation=activation,
        qkv_bias=bias,
        output_bias=bias,
        num_experts=experts,
        expert_size=size,
        routing=read_grouped_routing(file, experts, chosen, **how),
        shared_size=file.integer("n_shared_experts", 0) * size,
        dense_layers=dense_layers,
        latent=spec,
        low_rank=None if file.fields.get("q_lora_rank") is None else file.count("q_lora_rank"),
        corrected=corrected,
        interleaved=interleaved,
        growth=growth,
    )


def _read_spec(file: ConfigFile, rotated: bool) -> LatentSpec:
    """Return the attention of all layers."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if not rotated:
        file.require_absent(names[2], 0)
    rank, key, value = map(file.count, (names[0], names[1], names[3]), (512, 128, 128))
    rope = file.count(names[2], 64) if rotated else 0
    for name, size in zip(names, (rank, key, rope, value), strict=True):
        # Rotations work on pairs, and KV is moved in words of 32 bits.
        if size % 2:
            raise ConfigError(f"{name} in config.json is {size}; it must be even")
    return LatentSpec(
        scale=(key + rope) ** -0.5 * yarn_scale(file) ** 2,
        rank=rank,
        rope_dim=rope,
        key_dim=key,
        value_dim=value,
    )
