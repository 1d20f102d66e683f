"""The kinds of latent attention that layers of dots3-note have, read from config.json."""

from typing import Any

import msgspec

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.latent_spec import LatentSpec
from baton_engine.layers.rope import Rope, parse_layer_rope, rope_fields

from .deepseek_v32 import indexed_spec

# Those of transformers' configuration class.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 13824, "moe_intermediate_size": 1536,
    "num_hidden_layers": 46, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "kv_lora_rank": 512, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "max_position_embeddings": 524288, "rms_norm_eps": 1e-5, "shared_experts_intermediate_size": 1536,
}  # fmt: skip
# The sizes that the layers of a kind may have for themselves, with the defaults of layers with a window.
_SIZES = {
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "head_dim": 256,
    "qk_nope_head_dim": 192, "v_head_dim": 128,
}  # fmt: skip
_ROPE = "qk_rope_head_dim"
_INDEXED, _FULL, _WINDOW = "indexed_attention", "full_attention", "sliding_attention"
_SELECTING = (_INDEXED, "deepseek_sparse_attention")  # both are names of the same


class LatentKind(msgspec.Struct, frozen=True):
    """The latent attention of a layer: its sizes and its scale, query heads, elements of the compressed vector from
    which queries are computed, rope, and the factor of latents."""

    latent: LatentSpec
    heads: int
    low_rank: int
    rope: Rope
    latent_scale: float


def read_kinds(file: ConfigFile) -> tuple[LatentKind, ...]:
    """Return the attention of each layer. file: with the defaults of fields that are absent.

    Raises ConfigError for sizes that do not fit each other: all kinds rotate as many elements, and kinds whose queries
    have one size have values of one size.
    """
    layers = file.count("num_hidden_layers")
    names = _read_names(file, layers)
    window = file.count("sliding_window", file.count("sliding_window_size", 512))
    own = _read_sizes(file, names)
    ropes = {name: _read_rope(file, name) for name in sorted(set(names))}
    kinds: list[LatentKind] = []
    for layer, name in enumerate(names):
        prefix, sizes = own[layer]
        spec = _spec(file, prefix, sizes, name, window)
        hidden, low_rank = file.count("hidden_size"), sizes["q_lora_rank"]
        # transformers multiplies queries by a constant. Scores are linear in queries, so their scale takes it.
        spec = msgspec.structs.replace(spec, scale=spec.scale * (hidden / low_rank) ** 0.5)
        factor = (hidden / spec.rank) ** 0.5
        kinds.append(LatentKind(spec, sizes["num_attention_heads"], low_rank, ropes[name], factor))
    for layer, kind in enumerate(kinds):
        prefix, first = own[layer][0], kinds[0].latent
        if kind.latent.rope_dim != first.rope_dim:
            raise ConfigError(
                f"{prefix}{_ROPE} in config.json is {kind.latent.rope_dim}; it must be {first.rope_dim}, as in the "
                "first layer"
            )
        values = {other.latent.value_dim for other in kinds if other.latent.query_dim == kind.latent.query_dim}
        if len(values) > 1:
            raise ConfigError(
                f"{prefix}v_head_dim in config.json is {kind.latent.value_dim}, unlike that of other layers whose "
                f"queries also have {kind.latent.query_dim} elements; this is not served"
            )
    return tuple(kinds)


def _read_names(file: ConfigFile, layers: int) -> list[str]:
    """Return the name of each layer's kind of attention."""
    names = file.layer_types("layer_types", layers, (*_SELECTING, _FULL, _WINDOW))
    if names is None:
        windows = file.flag("use_sliding_window", True)
        names = [_WINDOW if windows and layer > 1 and layer % 4 != 1 else _FULL for layer in range(layers)]
        # A canonical config without kinds of layers has indexers.
        names = [_INDEXED if name == _FULL and file.flag("use_dsa", True) else name for name in names]
    names = [_INDEXED if name in _SELECTING else name for name in names]
    if file.fields.get("use_dsa") is None and "per_layer_config" in file.fields:
        return names
    # The authors call layers with an indexer full attention.
    old, new = (_FULL, _INDEXED) if file.flag("use_dsa", True) else (_INDEXED, _FULL)
    return [new if name == old else name for name in names]


def _read_sizes(file: ConfigFile, names: list[str]) -> list[tuple[str, dict[str, int]]]:
    """Return the sizes of each layer's attention, and what their names begin with in config.json."""
    common = {name: file.count(name) for name in (*_SIZES, _ROPE) if name not in ("num_key_value_heads", "head_dim")}
    common["num_key_value_heads"] = file.count("num_key_value_heads", common["num_attention_heads"])
    if file.fields.get("per_layer_config") is not None:
        given = file.part("per_layer_config").fields
        numbers = {str(layer) for layer in range(len(names))}
        if unknown := given.keys() - numbers - {"architectures"}:
            raise ConfigError(f"per_layer_config in config.json has {min(unknown)!r}, which is no number of a layer")
        return [_layer_sizes(file, str(layer), common) for layer in range(len(names))]
    window = {name: file.count(f"swa_{name}", default) for name, default in _SIZES.items()}
    rope = window["head_dim"] - window["qk_nope_head_dim"]
    window[_ROPE] = file.count(f"swa_{_ROPE}", rope if rope > 0 else None)
    return [("swa_", window) if name == _WINDOW else ("", common) for name in names]


def _layer_sizes(file: ConfigFile, layer: str, common: dict[str, int]) -> tuple[str, dict[str, int]]:
    own = file.part("per_layer_config").part(layer)
    given = {name: value for name, value in own.fields.items() if name != "architectures" and value is not None}
    prefix = f"per_layer_config.{layer}." if given else ""
    for name in given:
        if name not in (*_SIZES, _ROPE):
            raise ConfigError(f"{prefix}{name} in config.json is not served for {file.architecture}")
    named = ConfigFile({f"{prefix}{name}": value for name, value in given.items()})
    return prefix, {**common, **{name: named.count(f"{prefix}{name}") for name in given}}


def _spec(file: ConfigFile, prefix: str, sizes: dict[str, int], name: str, window: int) -> LatentSpec:
    """Return the attention of a layer, whose scale is that of queries without a factor."""
    heads, kv_heads, whole = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes.get("head_dim")
    if kv_heads != heads:
        raise ConfigError(
            f"{prefix}num_key_value_heads in config.json is {kv_heads}; it must be {heads}, as many as attention heads"
        )
    rank, rope, key, value = (sizes[size] for size in ("kv_lora_rank", _ROPE, "qk_nope_head_dim", "v_head_dim"))
    for size in ("kv_lora_rank", _ROPE, "qk_nope_head_dim", "v_head_dim"):
        # Rotations work on pairs, and KV is moved in words of 32 bits.
        if sizes[size] % 2:
            raise ConfigError(f"{prefix}{size} in config.json is {sizes[size]}; it must be even")
    if name == _WINDOW and whole not in (None, key + rope):
        raise ConfigError(
            f"{prefix}head_dim in config.json is {whole}; it must be {key + rope}, the sum of its two parts"
        )
    spec = LatentSpec(
        scale=(key + rope) ** -0.5, window=window if name == _WINDOW else None, rank=rank, rope_dim=rope, key_dim=key,
        value_dim=value,
    )  # fmt: skip
    return indexed_spec(file, spec, index_heads=64) if name == _INDEXED else spec


def _read_rope(file: ConfigFile, name: str) -> Rope:
    """Return the rope of the layers of a kind."""
    context, theta = file.count("max_position_embeddings"), file.number("rope_theta", 8e7)
    given = rope_fields(file)
    if not given:
        return Rope("default", file.number("swa_rope_theta", 5e4) if name == _WINDOW else theta)
    if given.keys() & {*_SELECTING, _FULL, _WINDOW}:
        # Authors' names of kinds, too, may have their parameters here.
        others = () if name == _WINDOW else (*_SELECTING, _FULL)
        present = [kind for kind in (name, *others) if given.get(kind) is not None]
        given = ConfigFile(given).part(present[0]).fields if present else {}
    rope = parse_layer_rope(given, theta, context, file)
    if rope.type == "proportional":
        raise ConfigError(f"rope type {rope.type!r} in config.json is not served for {file.architecture}")
    return rope
