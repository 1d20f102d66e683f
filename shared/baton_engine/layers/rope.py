"""Rotary position embeddings (Su et al., "RoFormer", 2021) and their context extensions."""

import math
from typing import Any

import msgspec
import torch
from torch.nn import functional

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile

_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


class Rope(msgspec.Struct, frozen=True):
    """A kind of rotary embedding and the parameters that this kind has."""

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
    # Fraction of a head's dimensions that is rotated: the first ones, or for "proportional" the first pairs.
    partial: float = 1.0
    interleaved: bool = False  # pairs are dimensions next to each other, as in the original paper
    # Factors of each pair's period, for contexts of up to original_max_position_embeddings and for longer ones.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def layout(self) -> list[str | float | int]:
        """The facts of a KV layout that describe how keys are rotated."""
        facts: list[str | float | int] = [self.type, self.theta, self.factor, self.original_max_position_embeddings]
        return [*facts, *([] if self.partial == 1.0 else [self.partial]), *self.short_factors]

    def limited(self, max_positions: int) -> "Rope":
        """Return the rope for an engine whose sequences have at most max_positions tokens."""
        if max_positions <= self.original_max_position_embeddings:
            return self
        return msgspec.structs.replace(self, short_factors=self.long_factors)

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many of a head's dimensions are rotated, the first ones."""
        return head_dim if self.type == "proportional" else int(head_dim * self.partial)

    def order(self, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int | None = None) -> list[int] | None:
        """Return the order of a QKV projection's outputs that `rotary_tables` needs; None = the checkpoint's order.

        The tables pair dimension i of a head with i + head_dim / 2, but a partial rotation pairs i with i + rotary_dim
        / 2, and an interleaved one 2 * i with 2 * i + 1. Queries and keys whose dimensions are permuted in the same way
        have the same dot products. value_dim: elements of a value; None = head_dim.
        """
        rotated = self.rotary_dim(head_dim)
        if rotated == head_dim and not self.interleaved:
            return None
        dims, half, middle = list(range(head_dim)), rotated // 2, rotated + (head_dim - rotated) // 2
        first, second = dims[:half], dims[half:rotated]
        if self.interleaved:
            first, second = dims[0:rotated:2], dims[1:rotated:2]
        moved = first + dims[rotated:middle] + second + dims[middle:]
        permuted = [head * head_dim + dim for head in range(num_heads + num_kv_heads) for dim in moved]
        return permuted + list(range(len(permuted), len(permuted) + num_kv_heads * (value_dim or head_dim)))


def fraction_of(rotated: int, head_dim: int) -> float:
    """Return `partial` of a rope that rotates so many of a head's dimensions."""
    fraction = rotated / head_dim
    return fraction if int(head_dim * fraction) == rotated else math.nextafter(fraction, 1.0)


def read_rope(
    file: ConfigFile, context: int, partial: float | None = None, *, theta: float = 10000.0, interleaved: bool = False
) -> Rope:
    """Return the rope of a config.json, which has either rope_parameters or the older rope_theta and rope_scaling.

    context: max_position_embeddings. partial: the fraction of a head that the family rotates by default; None = the
    family always rotates whole heads. theta: the family's default. interleaved: as in Rope.
    """
    parameters = rope_fields(file)
    given = parameters.pop("partial_rotary_factor", None)
    given = file.fields.get("partial_rotary_factor") if given is None else given
    if partial is None and given not in (None, 1.0):
        raise ConfigError(f"partial_rotary_factor {given!r} in config.json is not served for {file.architecture}")
    if given is not None and not (isinstance(given, int | float) and 0 < given <= 1):
        raise ConfigError(f"partial_rotary_factor in config.json is {given!r}; it must be above 0 and at most 1")
    rope = parse_rope(parameters, file.number("rope_theta", theta), context, file.fields)
    return msgspec.structs.replace(rope, partial=float(given or partial or 1.0), interleaved=interleaved)


def read_rope_before_norms(file: ConfigFile, context: int, **how: Any) -> Rope:
    """As read_rope, for a family that normalizes heads after their rotation. Raises ConfigError for a rope that scales
    queries and keys: the norms would remove that factor, except for its effect on their epsilon."""
    rope = read_rope(file, context, **how)
    if rope.attention_factor != 1.0:
        raise ConfigError(f"rope type {rope.type!r} in config.json is not served for {file.architecture}")
    return rope


def rope_fields(file: ConfigFile) -> dict[str, Any]:
    """Return the parameters of the rope of a config.json, in either of their forms."""
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = file.fields.get(name) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{name} in config.json is {value!r}; it must be an object")
        parameters |= value
    return parameters


def yarn_scale(file: ConfigFile) -> float:
    """Return the factor of queries and keys that mscale_all_dim in config.json requires (DeepSeek-V2)."""
    parameters = ConfigFile(rope_fields(file))
    kind = parameters.fields.get("rope_type") or parameters.fields.get("type") or "default"
    multiplier = parameters.number("mscale_all_dim", 0.0)
    return _grown(parameters.number("factor", 1.0), multiplier) if multiplier and kind != "default" else 1.0


def _grown(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def parse_rope(given: dict[str, Any], theta: float, context: int, fields: dict[str, Any]) -> Rope:
    """Return the rope with these parameters. theta: used if they name none. fields: all fields of config.json."""
    kind = given.get("rope_type") or given.get("type") or "default"
    # Sections of the pairs count tokens, rows and columns of an image: text has the same number in all of them. Dynamic
    # scaling begins beyond max_position_embeddings.
    kind = "default" if kind in ("mrope", "xdrope", "dynamic") else kind
    theta = float(given.get("rope_theta") or theta)
    if kind not in _TYPES:
        raise ConfigError(f"rope type {kind!r} is unknown; Baton serves {', '.join(_TYPES)}")
    if kind == "default":
        return Rope(kind, theta)
    original = (
        fields.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or context
    )
    factor = given.get("factor")
    if kind == "proportional":
        partial = given.get("partial_rotary_factor", 1.0)
        if not isinstance(partial, int | float) or not 0 < partial <= 1:
            raise ConfigError(f"partial_rotary_factor in config.json is {partial!r}; it must be above 0 and at most 1")
        return Rope(kind, theta, float(factor or 1.0), partial=float(partial))
    if factor is None and kind not in ("yarn", "longrope"):
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
        attention_factor=_attention_factor(kind, given, factor, original),
        truncate=given.get("truncate", True),
        short_factors=_factors(given, "short_factor") if kind == "longrope" else (),
        long_factors=_factors(given, "long_factor") if kind == "longrope" else (),
    )


def parse_layer_rope(given: dict[str, Any], theta: float, context: int, file: ConfigFile) -> Rope:
    """Return the rope of the layers of one kind, whose parameters are apart from those of other kinds.

    transformers takes original_max_position_embeddings from these alone, but truncate from beside the kinds.
    """
    truncate = rope_fields(ConfigFile({**file.fields, "rope_scaling": None})).get("truncate", True)
    return parse_rope({**given, "truncate": truncate}, theta, context, {})


def _factors(given: dict[str, Any], name: str) -> tuple[float, ...]:
    factors = given.get(name)
    if not isinstance(factors, list) or not all(isinstance(factor, int | float) and factor > 0 for factor in factors):
        raise ConfigError(f"{name} of the rope in config.json must be a list of numbers above 0")
    return tuple(map(float, factors))


def _attention_factor(kind: str, given: dict[str, Any], factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if given.get("mscale") and given.get("mscale_all_dim"):
        return _grown(factor, given["mscale"]) / _grown(factor, given["mscale_all_dim"])
    return _grown(factor, 1.0)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return [head_dim / 2] float32: radians per position of each rotated pair.

    linear: position interpolation (Chen et al., 2023). llama3: long wavelengths are divided by the factor, short ones
    kept, those between interpolated (Llama 3.1). yarn: "NTK-by-parts" (Peng et al., 2023). longrope: each pair has a
    factor of its own (Ding et al., 2024). proportional: only the fraction `partial` of the pairs is rotated (Gemma 4).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = rope.theta**exponents
    plain = 1.0 / periods
    if rope.type == "longrope":
        if len(rope.short_factors) != len(periods):
            found, needed = len(rope.short_factors), len(periods)
            raise ConfigError(f"longrope has {found} factors in config.json; {needed} are needed")
        return 1.0 / (torch.tensor(rope.short_factors) * periods)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "proportional":
        plain[int(rope.partial * head_dim // 2) :] = 0.0
        return plain / rope.factor
    if rope.type == "llama3":
        wavelengths = 2 * math.pi / plain
        kept = rope.original_max_position_embeddings / wavelengths - rope.low_freq_factor
        kept = (kept / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return (1 - kept) * plain / rope.factor + kept * plain
    if rope.type == "yarn":
        low, high = (_yarn_dimension(rope, head_dim, rotations) for rotations in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        # An empty range would cause a division by zero.
        high = high + 0.001 if low == high else high
        kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * (1.0 / (rope.factor * periods)) + kept * plain
    return plain


def _yarn_dimension(rope: Rope, head_dim: int, rotations: float) -> float:
    """Return the dimension that makes this many rotations over the original context."""
    period = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return head_dim * math.log(period) / (2 * math.log(rope.theta))


def rotary_tables(
    rope: Rope, head_dim: int, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of every position, [max_positions, head_dim / 2] float32 each.

    Dimensions outside a partial rotation have cosine 1 and sine 0. All dimensions are in the order of `Rope.order`.
    """
    rotated = rope.rotary_dim(head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * inverse_frequencies(rope, rotated)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    rest = (0, (head_dim - rotated) // 2)
    return functional.pad(cos, rest, value=1.0).to(device), functional.pad(sin, rest).to(device)
