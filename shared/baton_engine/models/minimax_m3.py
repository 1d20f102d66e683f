"""MiniMax-M3 (MiniMax, 2026): most layers attend to blocks of keys that an indexer selects, and have experts beside one
that all tokens use."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import torch

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.attention_spec import KeyBlockSpec
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.context import Context
from baton_engine.experts_method import ExpertNames, JoinedForm
from baton_engine.layers.experts import ExpertMlp, Router, WithSharedExpert, load_experts, load_joined_experts
from baton_engine.layers.key_block_attention import KeyBlockAttention, KeyBlockIndexer
from baton_engine.layers.linear import Linear
from baton_engine.layers.mlp import LimitedMlp
from baton_engine.layers.rope import Rope, read_rope
from baton_engine.shard import Columns, Rows
from baton_engine.source import Source
from baton_kernels.reference.activation import ClampedGate
from baton_kernels.reference.routing import Routing

from .llama import Defaults, Llama, LlamaConfig, LlamaLayer, head_norms, read_llama_config
from .sparse_config import SparseConfig, read_experts_per_token, read_layers_without_experts

_CONTEXT = 524288
# Those of transformers' configuration class.
_DEFAULTS = {
    "vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 3072, "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072, "num_hidden_layers": 60, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 128, "num_local_experts": 128,
}  # fmt: skip
# The values with which transformers computes every model of the family.
_GIVEN: dict[str, Any] = {
    "attention_bias": False, "n_shared_experts": 1, "qk_norm_type": "per_head", "scoring_func": "sigmoid",
    "use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True,
}  # fmt: skip
_GIVEN_OF_INDEXERS: dict[str, Any] = {
    "sparse_init_block": 0, "sparse_score_type": "max", "use_sparse_attention": True,
}  # fmt: skip
# The names in the authors' own configs, and those of transformers.
_INDEX_NAMES = {
    "sparse_num_index_heads": "index_n_heads", "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size", "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}  # fmt: skip
_KINDS = ("full_attention", "minimax_m3_sparse")
# The authors' configs call the gate swigluoai. transformers does not read the field.
_ACTIVATIONS = {"silu": "silu", "swigluoai": "silu"}
_EXPERTS = ExpertNames(gate="w1", up="w3", down="w2")


class MiniMaxM3Config(SparseConfig, frozen=True, kw_only=True):
    """clamp: the gate of all MLPs. The layers whose attention is a KeyBlockSpec have an indexer."""

    clamp: ClampedGate

    @property
    def selecting(self) -> list[int]:
        """The layers that have an indexer."""
        return [layer for layer, spec in enumerate(self.attention) if isinstance(spec, KeyBlockSpec)]

    @property
    def attention_weights(self) -> int:
        """As in ModelConfig, on average over layers with an indexer and without."""
        indexer = (self.num_kv_heads + 1) * self.head_dim * self.hidden_size
        return super().attention_weights + indexer * len(self.selecting) // self.num_layers

    def attention_lengths(self, longest: int) -> list[int]:
        selected = {spec.selected for spec in self.attention if isinstance(spec, KeyBlockSpec)}
        return sorted({*(min(each, longest) for each in selected), longest})

    def fingerprint_facts(self) -> dict[str, Any]:
        return {**super().fingerprint_facts(), "selecting": self.selecting}

    def kv_layout(self, dtype: str) -> KvLayout:
        layout = super().kv_layout(dtype)
        if not self.selecting:
            return layout
        # Each key-value head has a copy of the index key, so that ranks and hand-overs divide all planes alike. With a
        # rank for each key-value head, every rank needs the index key anyway. Layers without an indexer leave their
        # part of the plane unused.
        index = Plane("index", self.num_kv_heads, self.head_dim, dtype)
        return msgspec.structs.replace(layout, planes=(*layout.planes, index))


class MiniMaxM3Layer(LlamaLayer):
    """Checkpoints have the authors' names, or those of the text part alone as transformers saves it."""

    def make_attention(
        self, config: LlamaConfig, source: Source, layer: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
    ) -> Callable[[Any, Context], torch.Tensor]:
        if not isinstance(config.attention[layer], KeyBlockSpec):
            return super().make_attention(config, source, layer, rotary)
        prefix = "indexer." if "indexer.q_norm.weight" in source else "index_"
        norms = head_norms(config, source, (f"{prefix}q_norm", f"{prefix}k_norm"))
        order = config.rope.order(config.num_kv_heads + 1, 0, config.head_dim)
        names = f"{prefix}q_proj", f"{prefix}k_proj"
        indexer = KeyBlockIndexer(config, layer, source, names, order, norms, rotary)
        output, qkv = self.attended(config, source), self.qkv(config, source)
        return KeyBlockAttention(
            config, layer, source, qkv, output, rotary, self.qk_norms(config, source), indexer=indexer
        )  # fmt: skip

    def make_mlp(self, config: LlamaConfig, source: Source, layer: int) -> Callable[[Any], torch.Tensor]:
        assert isinstance(config, MiniMaxM3Config)
        if layer in config.dense_layers:
            return _mlp(config, source.at("mlp"), config.intermediate_size, Rows(source.ranks))
        count, hidden, size = config.num_experts, config.hidden_size, config.expert_size
        if "mlp.gate.weight" in source:
            source = source.at("mlp")
            correction = "gate.e_score_correction_bias"
            held = load_joined_experts(source.at("experts"), count, hidden, size, JoinedForm(activation=config.clamp))
        else:
            source = source.at("block_sparse_moe")
            correction = "e_score_correction_bias"
            names = replace(_EXPERTS, activation=config.clamp)
            held = load_experts(source.at("experts"), names, count, hidden, size)
        corrections = source.take(correction, (count,), dtype=torch.float32)
        router = Router(source.at("gate"), config.routing, count, hidden, correction=corrections)
        shared = _mlp(config, source.at("shared_experts"), config.shared_size, Rows(source.ranks, joins=False))
        return WithSharedExpert(ExpertMlp(router, held, source.ranks), shared, source.ranks)


def _mlp(config: MiniMaxM3Config, source: Source, size: int, rows: Rows) -> LimitedMlp:
    """Return an MLP. size: its hidden units. rows: how its output is divided."""
    hidden, shard = config.hidden_size, Columns(source.ranks)
    if "gate_up_proj.weight" in source:
        gate_up = Linear(source, ["gate_up_proj"], [2 * size], hidden, parts=[size, size], shard=shard)
    else:
        gate_up = Linear(source, ["gate_proj", "up_proj"], [size, size], hidden, shard=shard)
    return LimitedMlp(gate_up, Linear(source, ["down_proj"], [hidden], size, shard=rows), config.clamp)


class MiniMaxM3(Llama):
    layer = MiniMaxM3Layer

    @classmethod
    def read_config(cls, file: ConfigFile) -> LlamaConfig:
        file = file.with_defaults(_DEFAULTS)
        for name, value in _GIVEN.items():
            file.require_absent(name, value)
        layers, dim, experts = file.count("num_hidden_layers"), file.count("head_dim"), file.count("num_local_experts")
        limit = file.number("swiglu_limit", 7.0)
        if not limit > 0:
            raise ConfigError(f"swiglu_limit in config.json is {limit}; it must be above 0")
        config = read_llama_config(
            MiniMaxM3Config,
            ConfigFile({**file.fields, "intermediate_size": file.count("dense_intermediate_size")}),
            Defaults(_CONTEXT),
            activations=_ACTIVATIONS,
            rope=_rope(file, dim),
            norm_offset=1.0,
            qk_norm=True,
            num_experts=experts,
            expert_size=file.count("intermediate_size"),
            routing=Routing(
                read_experts_per_token(file, experts, 4), sigmoid=True, normalize=True,
                scale=file.number("routed_scaling_factor", 2.0),
            ),
            shared_size=file.count("shared_intermediate_size"),
            dense_layers=_dense_layers(file, layers),
            clamp=ClampedGate(file.number("swiglu_alpha", 1.702), limit),
        )  # fmt: skip
        own = file.part("sparse_attention_config")
        selecting = _selecting_layers(file, own, layers)
        if not any(selecting):
            return config
        spec = _spec(file, own, config)
        attention = tuple(spec if selects else config.attention[0] for selects in selecting)
        return msgspec.structs.replace(config, attention=attention)


def _rope(file: ConfigFile, dim: int) -> Rope:
    """Return the rotation. dim: of a head. Raises ConfigError if fields disagree on the part of it that is rotated."""
    rope = read_rope(file, file.count("max_position_embeddings", _CONTEXT), partial=1.0, theta=5e6)
    rotated = rope.rotary_dim(dim)
    if file.count("rotary_dim", rotated) != rotated:
        raise ConfigError(
            f"rotary_dim in config.json is {file.count('rotary_dim')}, but by partial_rotary_factor {rotated} of the "
            f"{dim} elements of a head are rotated, as transformers does"
        )
    return rope


def _dense_layers(file: ConfigFile, layers: int) -> frozenset[int]:
    """Return the layers without experts. The authors' configs have a number for each layer."""
    given = file.integers("moe_layer_freq")
    if given and file.fields.get("mlp_layer_types") is None:
        file = ConfigFile(
            {**file.fields, "mlp_layer_types": _kinds(given, layers, "moe_layer_freq", "dense", "sparse")}
        )
    return read_layers_without_experts(file, layers, 0)


def _selecting_layers(file: ConfigFile, own: ConfigFile, layers: int) -> list[bool]:
    """Return whether each layer has an indexer. own: the sparse_attention_config of the authors' configs."""
    kinds = file.layer_types("layer_types", layers, _KINDS)
    given = own.integers("sparse_attention_freq")
    if kinds is None and given:
        kinds = _kinds(given, layers, "sparse_attention_freq", *_KINDS)
    return [kind == _KINDS[1] for kind in kinds or [_KINDS[0]] * layers]


def _kinds(given: list[int], layers: int, name: str, without: str, having: str) -> list[str]:
    """Return the kind of each layer from a list of numbers, of which 0 stands for `without`."""
    if len(given) != layers:
        raise ConfigError(
            f"{name} in config.json has {len(given)} numbers; it must have one for each of {layers} layers"
        )
    return [having if number else without for number in given]


def _spec(file: ConfigFile, own: ConfigFile, config: LlamaConfig) -> KeyBlockSpec:
    """Return the attention of layers with an indexer. own: as in _selecting_layers, whose fields come first."""
    for name, value in _GIVEN_OF_INDEXERS.items():
        own.require_absent(name, value)
    # Layers with an indexer have no values of index keys; the numbers of other layers mean nothing.
    disabled = own.integers("sparse_disable_index_value")
    if not all(number for number, freq in zip(disabled, own.integers("sparse_attention_freq"), strict=False) if freq):
        raise ConfigError(
            f"sparse_disable_index_value in config.json is {disabled}; values of index keys are not served"
        )
    named = {ours: own.fields[name] for name, ours in _INDEX_NAMES.items() if own.fields.get(name) is not None}
    file = ConfigFile({**file.fields, **named})
    for name, needed, what in (
        ("index_n_heads", config.num_kv_heads, "num_key_value_heads"),
        ("index_head_dim", config.head_dim, "head_dim"),
    ):
        if file.count(name, needed) != needed:
            raise ConfigError(f"{name} in config.json is {file.count(name)}; Baton serves {needed}, the {what}, alone")
    blocks = file.count("index_topk_blocks", 16)
    return KeyBlockSpec(
        scale=config.attention[0].scale, selected_blocks=blocks, block_keys=file.count("index_block_size", 128),
        local_blocks=file.at_most("index_local_blocks", blocks, 1),
    )  # fmt: skip
