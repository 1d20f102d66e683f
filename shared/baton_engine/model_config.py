"""A model folder's config.json, read into the few facts that the engine computes with.

Field names and defaults follow the Hugging Face configuration classes of each family.
"""

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from baton_common.extent import Extent

from .config import ConfigError


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embedding: its type and the parameters that this type has."""

    type: str
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer. Sizes are in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    sliding_windows: tuple[int | None, ...]  # per layer, in tokens, the query's own included
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # of the checkpoint
    eos_token_ids: tuple[int, ...]

    def extent(self, first_token: int, num_tokens: int, first_layer: int = 0, num_layers: int | None = None) -> Extent:
        """Return the extent of all heads of some tokens' KV; of all layers unless some are told."""
        return Extent(
            first_token=first_token,
            num_tokens=num_tokens,
            first_layer=first_layer,
            num_layers=self.num_layers if num_layers is None else num_layers,
            first_head=0,
            num_heads=self.num_kv_heads,
        )


class Family(msgspec.Struct, frozen=True):
    """What the families of the Llama line differ in."""

    num_kv_heads: int | None  # when config.json names none; None = as many as heads
    head_dim: int | None  # likewise; None = hidden_size / heads
    max_position_embeddings: int  # when config.json does not say
    rms_norm_eps: float = 1e-6
    qkv_bias: bool | None = None  # None = as attention_bias says
    qk_norm: bool = False
    has_mlp_bias: bool = False
    sliding_window: int | None = None  # when config.json does not mention it
    window_is_optional: bool = False  # use_sliding_window, max_window_layers and layer_types apply


FAMILIES = {
    "LlamaForCausalLM": Family(None, None, 2048, has_mlp_bias=True),
    "MistralForCausalLM": Family(8, None, 131072, qkv_bias=False, sliding_window=4096),
    "Qwen2ForCausalLM": Family(32, None, 32768, qkv_bias=True, sliding_window=4096, window_is_optional=True),
    "Qwen3ForCausalLM": Family(32, 128, 32768, qk_norm=True, sliding_window=4096, window_is_optional=True),
}


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json of a Hugging Face model folder. Raises ConfigError for what cannot be served."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not a model folder: it has no config.json") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return parse_model_config(raw)


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Return the facts in the contents of a config.json."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise ConfigError(f"unknown architecture {architecture}; served are {', '.join(FAMILIES)}")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "an unnamed method")
        raise ConfigError(f"the weights are quantized ({method}), which is not served; use a checkpoint that is not")
    try:
        heads, layers, hidden = raw["num_attention_heads"], raw["num_hidden_layers"], raw["hidden_size"]
        kv_heads = raw.get("num_key_value_heads", family.num_kv_heads) or heads
        head_dim = raw.get("head_dim", family.head_dim) or hidden // heads
        context = raw.get("max_position_embeddings", family.max_position_embeddings)
        if heads % kv_heads:
            raise ConfigError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
        if head_dim % 2:
            raise ConfigError(f"head_dim is {head_dim}; rotary embeddings need an even one")
        act = raw.get("hidden_act", "silu")
        if act != "silu":
            raise ConfigError(f"hidden_act {act!r} is unknown; the served architectures have silu")
        attention_bias = bool(raw.get("attention_bias", False))
        eos = raw.get("eos_token_id")
        return ModelConfig(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=context,
            rms_norm_eps=raw.get("rms_norm_eps", family.rms_norm_eps),
            rope=_rope(raw, context),
            sliding_windows=_sliding_windows(raw, family, layers),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias and family.qkv_bias is None,
            mlp_bias=family.has_mlp_bias and bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]!r}") from None


def _sliding_windows(raw: dict[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window", family.sliding_window)
    if family.window_is_optional and not raw.get("use_sliding_window", False):
        window = None
    if window is None or family.sliding_window is None:
        return (None,) * layers
    types = raw.get("layer_types") if family.window_is_optional else None
    if types is None:
        first = raw.get("max_window_layers", 28) if family.window_is_optional else 0
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _rope(raw: dict[str, Any], context: int) -> Rope:
    """Both forms of the field: rope_parameters, and the older rope_theta with rope_scaling."""
    given = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = float(given.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(f"rope type {kind!r} is unknown; served are default, linear, llama3 and yarn")
    if given.get("partial_rotary_factor", raw.get("partial_rotary_factor")) not in (None, 1.0):
        raise ConfigError("partial_rotary_factor other than 1 is not part of the served architectures")
    if kind == "default":
        return Rope(kind, theta)
    original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or context
    factor = given.get("factor")
    if factor is None and kind != "yarn":
        raise ConfigError(f"rope type {kind!r} needs a factor")
    factor = float(context / original if factor is None else factor)
    return Rope(
        kind,
        theta,
        factor,
        original,
        low_freq_factor=given.get("low_freq_factor", 1.0),
        high_freq_factor=given.get("high_freq_factor", 4.0),
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        attention_factor=_yarn_attention_factor(given, factor) if kind == "yarn" else 1.0,
        truncate=given.get("truncate", True),
    )


def _yarn_attention_factor(given: dict[str, Any], factor: float) -> float:
    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given["mscale"]) / scale(given["mscale_all_dim"])
    return scale(1.0)
