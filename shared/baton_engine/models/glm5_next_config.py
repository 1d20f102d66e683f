"""The config of the text part of GLM-5.3-Flash (GLM Team, 2026)."""

from typing import Any

import msgspec

from baton_common.kv_layout import KvLayout
from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.layers.hyper_connections import Mixing
from baton_kernels.reference.recurrence import StateShape

from .deepseek_v32 import IndexedConfig, read_indexed_config
from .glm_moe_dsa import layers_with_indexers
from .latent_states import WithLatentStates, specs_with_states
from .llama import SILU
from .recurrent_states import check_length
from .streams import MOST_STREAMS, WithStreams

# Those of transformers' configuration class.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 45, "num_attention_heads": 64, "n_shared_experts": 1, "n_routed_experts": 288,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 256, "v_head_dim": 256,
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "first_k_dense_replace": 3,
}  # fmt: skip
# The values with which every model of the family is computed.
_GIVEN: dict[str, Any] = {
    "index_kpool_always_select_tail": True, "index_kpool_compress": True, "mhc": True, "mla_use_nope": True,
    "moe_layer_freq": 1,
}  # fmt: skip
_STATE = "linear_attention"
_INDEXED = ("indexed_attention", "full_attention", "deepseek_sparse_attention")  # all are names of the same
_LEAST_LOG_DECAY = -5.0
# The most tokens of a group. Blocks of the cache have whole groups.
_MOST_TOGETHER = 64
# The fields of linear_attn_config, and those that transformers writes in its place, with their defaults.
_LINEAR = {
    "num_heads": ("linear_num_heads", 64), "head_dim": ("linear_head_dim", 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}  # fmt: skip


class Glm5NextConfig(WithStreams, WithLatentStates, IndexedConfig, frozen=True, kw_only=True):
    """mixing, rounds: as in MixedConnection. limit: of gates and ups in all MLPs. least: as in Delta."""

    state_layers: frozenset[int]
    states: StateShape | None
    least: float
    mixing: Mixing
    rounds: int
    limit: float

    @property
    def projections(self) -> list[tuple[int, int]]:
        streams, gates = self.mixing.streams, (self.latent.index_dim, self.hidden_size)
        connection = (2 + streams) * streams, self.stream_size
        return [*super().projections, gates, connection, connection]

    def kv_layout(self, dtype: str) -> KvLayout:
        return msgspec.structs.replace(super().kv_layout(dtype), together=self.latent.group)


def read_glm5_next_config(file: ConfigFile) -> Glm5NextConfig:
    """Return the config of a config.json. Raises ConfigError for a model that is not served."""
    for name, value in _GIVEN.items():
        file.require_absent(name, value)
    file.choice("hidden_act", "silu", tuple(SILU))
    least = _read_least(file)
    file = file.with_defaults(_DEFAULTS)
    layers, heads = file.count("num_hidden_layers"), file.count("num_attention_heads")
    file.require_absent("num_key_value_heads", heads)
    kinds = file.layer_types("layer_types", layers, (_STATE, *_INDEXED))
    if kinds is None:
        kinds = [_INDEXED[0] if layer % 4 == 3 else _STATE for layer in range(layers)]
    state_layers = frozenset(layer for layer, kind in enumerate(kinds) if kind == _STATE)
    config = read_indexed_config(
        file, _DEFAULTS, index_heads=32, index_interleaved=False, rotated=False,
        selecting=_selecting_layers(file, layers, state_layers),
    )  # fmt: skip
    size = file.at_most("index_kpool", _MOST_TOGETHER, 16)
    if config.latent.selected % size:
        raise ConfigError(
            f"index_topk in config.json is {config.latent.selected}; it must be a multiple of index_kpool, {size}"
        )
    limit, eps = file.number("swiglu_limit", 10.0), config.rms_norm_eps
    if not limit > 0:
        raise ConfigError(f"swiglu_limit in config.json is {limit}; it must be above 0")
    latent = msgspec.structs.replace(config.latent, group=size)
    changed = {
        "latent": latent, "attention": specs_with_states(latent, state_layers, layers), "latent_eps": eps,
    }  # fmt: skip
    return Glm5NextConfig(
        **{**msgspec.structs.asdict(config), **changed},
        state_layers=state_layers,
        states=_read_states(file) if state_layers else None,
        least=least,
        mixing=Mixing(file.at_most("hc_mult", MOST_STREAMS, 4), eps, file.number("hc_eps", 1e-6), 2.0),
        rounds=file.count("hc_sinkhorn_iters", 20),
        limit=limit,
    )


def _selecting_layers(file: ConfigFile, layers: int, state_layers: frozenset[int]) -> frozenset[int]:
    """Return the layers with an indexer. config.json may also name layers that have no attention."""
    found = layers_with_indexers(file) - state_layers
    first = min(frozenset(range(layers)) - state_layers, default=None)
    if first is None:
        raise ConfigError("layer_types in config.json names no layer with attention, which is not served")
    if first not in found:
        raise ConfigError(
            f"indexer_types in config.json gives layer {first} no indexer, and no earlier layer can select its tokens"
        )
    return found


def _read_states(file: ConfigFile) -> StateShape:
    own = file.part("linear_attn_config")
    heads, dim, length = (own.count(name, file.count(*other)) for name, other in _LINEAR.items())
    check_length(length, "linear_conv_kernel_dim")
    return StateShape(1, heads, heads, dim, dim, length)


def _read_least(file: ConfigFile) -> float:
    """Return the bound of the logarithms of decays, as in Delta. The field for it may be null: there is none."""
    own = file.part("linear_attn_config")
    least = own.fields.get("gate_lower_bound", file.fields.get("linear_lower_bound", _LEAST_LOG_DECAY))
    if least is None:
        return _LEAST_LOG_DECAY if "linear_attn_config" in file.fields and own.flag("safe_gate", True) else 0.0
    bound = ConfigFile({"linear_lower_bound": least}).number("linear_lower_bound")
    if not bound < 0:
        raise ConfigError(f"linear_lower_bound in config.json is {bound}; it must be less than 0")
    return bound
