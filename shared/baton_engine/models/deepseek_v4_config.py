"""The config of DeepSeek-V4 (DeepSeek-AI, 2026)."""

from typing import Any, Self

import msgspec

from baton_common.kv_layout import KvLayout, Plane
from baton_engine.compressed_spec import CompressedSpec, Entries
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.hyper_connections import Mixing
from baton_engine.layers.rope import Rope, fraction_of, parse_rope, rope_fields
from baton_kernels.reference.compression import Compression
from baton_kernels.reference.routing import Routing

from .entry_layers import Place, Windows, cache_layers, sharing
from .llama import SILU
from .sparse_config import SparseConfig, read_experts_per_token
from .streams import MOST_STREAMS, WithStreams

_NEAR, _SELECTED, _ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO = {0: _NEAR, 4: _SELECTED, 128: _ALL}
_RATES = {_SELECTED: ("compress_rate_csa", 4), _ALL: ("compress_rate_hca", 128)}
_LARGEST_RATE = 1024  # Kernels have the tokens of a window in one tile.
_TABLE, _CHOSEN = "hash_moe", "moe"
# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
    "max_position_embeddings": 1048576, "sliding_window": 128,
}  # fmt: skip
# The values with which transformers computes every model of the family.
_GIVEN: dict[str, Any] = {
    "num_key_value_heads": 1, "n_shared_experts": 1, "norm_topk_prob": True, "topk_method": "noaux_tc",
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


class DeepseekV4Config(WithStreams, SparseConfig, frozen=True, kw_only=True):
    """num_layers: of the cache. places, starts: as cache_layers returns them. rope: of layers without entries.
    entry_rope: of the others. low_rank, output_groups, output_rank: as in AttentionSizes. index_heads: of indexers.
    mixing, rounds: as in MixedConnection. limit: of gates and ups of experts. table_layers: the layers of the model
    whose experts come from tables."""

    places: tuple[Place, ...]
    starts: tuple[int, ...]
    entry_rope: Rope
    low_rank: int
    output_groups: int
    output_rank: int
    index_heads: int
    mixing: Mixing
    rounds: int
    limit: float
    table_layers: frozenset[int]

    def compressed(self, number: int) -> CompressedSpec:
        """Return the attention of a layer of the model."""
        spec = self.attention[self.places[number].keys]
        assert isinstance(spec, CompressedSpec)
        return spec

    @property
    def recent_tokens(self) -> int:
        return 2 if self._state_layers else 1

    @property
    def projections(self) -> list[tuple[int, int]]:
        heads, dim, hidden = self.num_heads * self.head_dim, self.head_dim, self.hidden_size
        count = self.mixing.streams
        connection = (2 + count) * count, self.stream_size
        grouped = self.output_groups * self.output_rank
        return [
            (self.low_rank + dim, hidden), (heads, self.low_rank), (grouped, heads // self.output_groups),
            (hidden, grouped), connection, connection,
        ]  # fmt: skip

    @property
    def attention_weights(self) -> int:
        """As in ModelConfig, on average over the layers of the cache."""
        total = len(self.places) * super().attention_weights
        for entries in self._entries:
            series = 2 if entries.selected else 1
            total += 2 * series * (self.head_dim + entries.index_dim) * self.hidden_size
            total += self.index_heads * (entries.index_dim * self.low_rank + self.hidden_size) * (series - 1)
        return total // self.num_layers

    def _weights(self, experts: float) -> float:
        share = len(self.places) / self.num_layers
        return (
            self.attention_weights
            + share * self.num_experts * self.hidden_size
            + 3 * self.hidden_size * (self._units(experts))
        )

    def _units(self, experts: float) -> float:
        return super()._units(experts) * len(self.places) / self.num_layers

    def attention_lengths(self, longest: int) -> list[int]:
        """As in ModelConfig. From some length on, queries attend to selected entries."""
        found = {entries.selected * entries.rate for entries in self._entries if entries.selected}
        return sorted({*(min(length, longest) for length in found), longest})

    def fingerprint_facts(self) -> dict[str, Any]:
        entries = [[each.layer, each.place, each.rate, each.index_dim, each.selected] for each in self._entries]
        return {**super().fingerprint_facts(), "entries": entries, "entry_rope": self.entry_rope.layout}

    def limited(self, max_positions: int) -> Self:
        own = super().limited(max_positions)
        return msgspec.structs.replace(own, entry_rope=self.entry_rope.limited(max_positions))

    def kv_layout(self, dtype: str) -> KvLayout:
        plane, states = Plane("key", 1, self.head_dim, dtype), self._state_layers
        rows = -(-4 * max(map(self._numbers, self._entries), default=0) // plane.head_bytes)
        return KvLayout(
            self.num_layers, (plane,), self.sliding_windows, state_layers=states, state_rows=rows,
            stage_starts=self.starts,
        )  # fmt: skip

    @property
    def _entries(self) -> list[Entries]:
        specs = (self.compressed(number) for number in range(len(self.places)))
        return [spec.entries for spec in specs if spec.entries is not None]

    @property
    def _state_layers(self) -> tuple[int, ...]:
        return tuple(place.states for place in self.places if place.states is not None)

    def _numbers(self, entries: Entries) -> int:
        """Return the float32 numbers of a layer's states."""
        overlaps = entries.selected > 0
        return sum(
            Compression(dim, entries.rate, overlaps, 0, 0, 0).numbers for dim in (self.head_dim, entries.index_dim)
        )


def read_deepseek_v4_config(file: ConfigFile) -> DeepseekV4Config:
    """Return the config of a config.json. Raises ConfigError for a model that is not served."""
    for name, value in _GIVEN.items():
        file.require_absent(name, value)
    file = file.with_defaults(_DEFAULTS)
    layers, heads, dim = (file.count(name) for name in ("num_hidden_layers", "num_attention_heads", "head_dim"))
    context, experts = file.count("max_position_embeddings"), file.count("n_routed_experts", 256)
    size, groups = file.count("moe_intermediate_size", 2048), file.count("o_groups", 8)
    if heads % groups:
        raise ConfigError(f"o_groups in config.json is {groups}; it must divide the {heads} attention heads")
    rope, entry_rope = _read_ropes(file, dim, context)
    kinds = _read_kinds(file, layers)
    windows = _read_windows(file, set(kinds), dim, max(each.rotary_dim(dim) for each in (rope, entry_rope)))
    specs, places, starts = cache_layers(
        [windows.get(kind) for kind in kinds], scale=dim**-0.5, window=file.count("sliding_window"), sinks=True
    )
    limit, eps = file.number("swiglu_limit", 10.0), file.number("rms_norm_eps", 1e-6)
    if not limit > 0:
        raise ConfigError(f"swiglu_limit in config.json is {limit}; it must be above 0")
    scores = file.choice("scoring_func", "sqrtsoftplus", ("sqrtsoftplus", "sigmoid"))
    routing = Routing(
        read_experts_per_token(file, experts, 6), sigmoid=scores == "sigmoid", root_softplus=scores == "sqrtsoftplus",
        normalize=True, scale=file.number("routed_scaling_factor", 1.5),
    )  # fmt: skip
    return DeepseekV4Config(
        architecture=file.architecture,
        vocab_size=file.count("vocab_size"),
        hidden_size=file.count("hidden_size"),
        intermediate_size=size,
        num_layers=len(specs),
        num_heads=heads,
        num_kv_heads=1,
        head_dim=dim,
        max_position_embeddings=context,
        tie_word_embeddings=file.flag("tie_word_embeddings"),
        dtype=file.dtype,
        eos_token_ids=file.eos_token_ids,
        attention=specs,
        rms_norm_eps=eps,
        rope=rope,
        activation=SILU[file.choice("hidden_act", "silu", tuple(SILU))],
        num_experts=experts,
        expert_size=size,
        routing=routing,
        shared_size=size,
        places=places,
        starts=starts,
        entry_rope=entry_rope,
        low_rank=file.count("q_lora_rank", 1024),
        output_groups=groups,
        output_rank=file.count("o_lora_rank", 1024),
        index_heads=file.count("index_n_heads", 64),
        mixing=Mixing(file.at_most("hc_mult", MOST_STREAMS, 4), eps, file.number("hc_eps", 1e-6), 2.0),
        rounds=file.count("hc_sinkhorn_iters", 20),
        limit=limit,
        table_layers=_read_tables(file, layers),
    )


def _read_kinds(file: ConfigFile, layers: int) -> list[str]:
    """Return the kind of attention of each layer."""
    kinds = file.layer_types("layer_types", layers, (_NEAR, _SELECTED, _ALL))
    if kinds is not None:
        return kinds
    # The authors also list the layers that predict several tokens, which are not served.
    ratios = file.integers("compress_ratios")
    if not ratios:
        return [_ALL if layer < 2 or layer % 2 == 0 else _SELECTED for layer in range(layers)]
    if len(ratios) < layers or not set(ratios[:layers]) <= set(_BY_RATIO):
        raise ConfigError(
            f"compress_ratios in config.json is {ratios}; it must have one of {', '.join(map(str, _BY_RATIO))} for "
            f"each of {layers} layers"
        )
    return [_BY_RATIO[ratio] for ratio in ratios[:layers]]


def _read_windows(file: ConfigFile, kinds: set[str], dim: int, rotated: int) -> dict[str, Windows]:
    """Return the windows of each kind of layers that has entries. rotated: elements of a head."""
    rates = file.part("compress_rates")
    index_dim, selected = file.count("index_head_dim", 128), file.count("index_topk", 512)
    found = {}
    for kind, (older, default) in _RATES.items():
        if kind not in kinds:
            continue
        rate, indexes = (
            file.at_most(older, _LARGEST_RATE, rates.at_most(kind, _LARGEST_RATE, default)),
            kind == _SELECTED,
        )
        shared = sharing(rate, dim, index_dim if indexes else 0)
        if indexes and (index_dim % 2 or not rotated <= index_dim <= dim):
            raise ConfigError(
                f"index_head_dim in config.json is {index_dim}; it must be even, at least the {rotated} rotated "
                f"elements of a head and at most head_dim, {dim}"
            )
        if not shared:
            raise ConfigError(
                f"{kind} in compress_rates in config.json is {rate}; it must be even, because entries and their index "
                "keys lie in different rows"
            )
        found[kind] = Windows(rate, selected if indexes else 0, index_dim if indexes else 0, shared)
    return found


def _read_ropes(file: ConfigFile, dim: int, context: int) -> tuple[Rope, Rope]:
    """Return the ropes of layers without entries and with them. dim: elements of a head."""
    given = rope_fields(file)
    fraction = file.number("partial_rotary_factor", file.count("qk_rope_head_dim", 64) / dim)
    theta = file.number("rope_theta", 10000.0)
    main: dict[str, Any] = {"rope_theta": theta}
    others = {**given, "rope_theta": file.number("compress_rope_theta", 160000.0)}
    if isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict):
        main, others = given["main"], given["compress"]
    elif (others.get("rope_type") or others.get("type")) == "yarn":
        # The authors do not scale queries and keys.
        others.setdefault("attention_factor", 1.0)
    found = []
    for parameters in (main, others):
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in ("default", "yarn"):
            raise ConfigError(f"rope type {kind!r} in config.json is not served for {file.architecture}")
        rotated = int(dim * ConfigFile(parameters).number("partial_rotary_factor", fraction))
        if rotated % 2 or not 2 <= rotated <= dim:
            raise ConfigError(
                f"partial_rotary_factor in config.json rotates {rotated} of the {dim} elements of a head; it must be "
                "an even number from 2 on"
            )
        rope = parse_rope(parameters, theta, context, {})
        found.append(msgspec.structs.replace(rope, partial=fraction_of(rotated, dim)))
    return found[0], found[1]


def _read_tables(file: ConfigFile, layers: int) -> frozenset[int]:
    """Return the layers whose experts come from tables."""
    kinds = file.layer_types("mlp_layer_types", layers, (_TABLE, _CHOSEN))
    if kinds is None:
        return frozenset(range(min(file.integer("num_hash_layers", 3), layers)))
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == _TABLE)
