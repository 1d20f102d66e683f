"""FP8 weights of DeepSeek-V3 (DeepSeek-AI, 2024) with a scale for each tile, and of transformers and AutoFP8."""

from collections.abc import Callable

import torch

from baton_engine.config import ConfigError
from baton_engine.source import Method, Source
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight

from .dense import DENSE
from .fields import QuantizationFields
from .mxfp4 import Mxfp4
from .names import NotConverted
from .packed import divide
from .scaled import ScaledMethod
from .scaled_part import Part

FP8 = torch.float8_e4m3fn
# Columns that share a scale, which are one step of the kernels.
_WIDTHS = (32, 64, 128, 256)


class Fp8(ScaledMethod, frozen=True):
    """Codes `weight`, and scales `weight_scale_inv` or `weight_scale`, which codes are multiplied with.

    tile: outputs and inputs that share a scale; None = all. static: activations have the scale `activation_scale` or
    `input_scale`.
    """

    tile: tuple[int, int] | None
    static: bool

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        codes = source.take(f"{name}.weight", (outputs, inputs), (rows, columns), FP8)
        scale = None
        if self.static:
            field = f"{name}.activation_scale" if f"{name}.activation_scale" in source else f"{name}.input_scale"
            scale = take_one(source, field)
        field = f"{name}.weight_scale_inv" if f"{name}.weight_scale_inv" in source else f"{name}.weight_scale"
        if self.tile is None:
            return Part(ScaledWeight(codes, by_output(take_one(source, field), codes), (1, codes.shape[1])), scale)
        return Part(with_tiles(source, field, codes, self.tile, (outputs, inputs), rows, columns), scale)


def with_tiles(
    source: Source, name: str, codes: torch.Tensor, tile: tuple[int, int], shape: tuple[int, int], rows: slice,
    columns: slice,
) -> ScaledWeight:  # fmt: skip
    """Return a part of a weight of this shape with the scales of its tiles. Each output has a scale of its own if the
    part has some outputs of a tile, but not all.

    name: of the scales. codes: of that part.
    """
    first, stop = rows.start // tile[0] * tile[0], min(-(-rows.stop // tile[0]) * tile[0], shape[0])
    scales = _tile_scales(source, name, tile, shape, slice(first, stop), columns)
    if (first, stop) == (rows.start, rows.stop):
        return ScaledWeight(codes, scales, tile)
    of_outputs = scales.repeat_interleave(tile[0], dim=0)[rows.start - first : rows.stop - first]
    return ScaledWeight(codes, of_outputs.contiguous(), (1, tile[1]))


def _tile_scales(
    source: Source, name: str, tile: tuple[int, int], shape: tuple[int, int], rows: slice, columns: slice
) -> torch.Tensor:
    """Return the scales of whole tiles of a weight of this shape, float32."""
    parts = []
    for part, size, per_tile in zip((rows, columns), shape, tile, strict=True):
        # The last tile may be cut off.
        stop = -(-part.stop // per_tile) * per_tile if part.stop == size else part.stop
        parts.append(divide(slice(part.start, stop), per_tile, name))
    shape = -(-shape[0] // tile[0]), -(-shape[1] // tile[1])
    stored = source.stored_dtype(name)
    # Some tools store powers of two as exponents only.
    dtype = stored if stored == torch.float8_e8m0fnu else torch.float32
    return source.take(name, shape, (parts[0], parts[1]), dtype).float()


def take_one(source: Source, name: str) -> torch.Tensor:
    """Return a tensor that has one element, [1] float32."""
    shape = source.stored_shape(name)
    if shape not in ((), (1,), (1, 1)):
        raise ConfigError(
            f"{source.full_name(name)} has the shape {list(shape)}; quantization_config calls for one number"
        )
    return source.take(name, shape, dtype=torch.float32).reshape(1)


def by_output(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Repeat one scale for all outputs, [outputs, 1]."""
    return scale.reshape(1, 1).expand(len(codes), 1).contiguous()


def read_policy(fields: QuantizationFields) -> Callable[[str, bool, Callable[[str], bool]], Method]:
    fields.choice("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    static = fields.choice("activation_scheme", "dynamic", ("dynamic", "static")) == "static"
    powers = fields.choice("scale_fmt", "float", ("float", "ue8m0")) == "ue8m0"
    tile = read_tile(fields.fields.get("weight_block_size"))
    if static and tile is not None:
        raise fields.refuse("FP8 tiles and static activations", "Baton serves tiles with dynamic activations")
    group = 0 if tile is None else tile[1]
    method = Fp8(RowFormat(FP8, group=group, power_of_two=powers), tile, static)
    left_out = NotConverted([*fields.names("modules_to_not_convert"), *fields.names("ignored_layers")])

    def policy(name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        if left_out.has(name):
            return DENSE
        # DeepSeek-V4 has experts in MXFP4 beside projections in FP8.
        if stored(f"{name}_blocks"):
            return Mxfp4()
        # Tools leave the head and routers out without saying so.
        quantized = stored(f"{name}.weight_scale_inv") or stored(f"{name}.weight_scale")
        return method if quantized else DENSE

    return policy


def read_tile(value: object) -> tuple[int, int] | None:
    """Return how many outputs and inputs share a scale; None = all. Other inputs than _WIDTHS are an error."""
    if value is None:
        return None
    if isinstance(value, str) and all(size.isdecimal() for size in value.split("x")):
        # Older versions of compressed-tensors write 128x128.
        value = [int(size) for size in value.split("x")]
    valid = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    if not valid or not isinstance(value, list) or value[1] not in _WIDTHS:
        raise ConfigError(
            f"the weights are quantized in tiles of {value!r}; Baton serves [outputs, inputs] with {_WIDTHS} inputs"
        )
    return value[0], value[1]
