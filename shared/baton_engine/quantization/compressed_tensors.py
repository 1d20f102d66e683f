"""The format of compressed-tensors, which llm-compressor writes.

Each group of the config names modules and how their weights and activations are stored. Names come before patterns,
and patterns before "Linear", which stands for all linear layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from baton_engine.config import ConfigError
from baton_engine.source import Method, Source
from baton_kernels.reference.grouped_linear import GroupedWeight, held_exponents
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight

from .dense import DENSE
from .fields import QuantizationFields
from .fp8 import FP8, by_output, read_tile, take_one, with_tiles
from .grouped import GroupedMethod, Part, check_group, pack_codes
from .mxfp4 import GROUP, split_pairs
from .names import ExactOrPattern
from .nvfp4 import GROUP as NVFP4_GROUP
from .nvfp4 import Nvfp4
from .packed import divide, group_order, unpack
from .scaled import ScaledMethod
from .scaled_part import Part as ScaledPart

_SERVED = (
    "Baton serves FP8 (float, 8 bits: per tensor, per channel or in blocks) and INT8 (symmetric, per tensor or per "
    "channel) with activations alike or none, INT4 and INT8 weights in groups without activations, and MXFP4, MXFP8 "
    "and NVFP4 weights"
)


class Packed(GroupedMethod, frozen=True):
    """pack-quantized: codes `weight_packed` [outputs, inputs / codes of 32 bits], `weight_scale` [outputs, groups],
    `weight_zero_point` [outputs / codes of 32 bits, groups], and `weight_g_idx`, the group of each input."""

    bits: int
    group: int
    symmetric: bool

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        full, per_word = source.full_name(name), 32 // self.bits
        group = check_group(full, self.group, inputs, columns)
        if f"{name}.weight_shape" in source:
            _check_shape(full, source.take(f"{name}.weight_shape", (2,), dtype=torch.int64), outputs, inputs)
        order = None
        if f"{name}.weight_g_idx" in source:
            order = group_order(full, source.take(f"{name}.weight_g_idx", (inputs,), dtype=torch.int32), group)
            if order is not None and (columns.start, columns.stop) != (0, inputs):
                raise ConfigError(f"{full} has inputs in order of activation (actorder), which cannot be divided among "
                                  "ranks")  # fmt: skip
        part = rows, divide(columns, per_word, name)
        words = source.take(f"{name}.weight_packed", (outputs, inputs // per_word), part, torch.int32)
        codes = unpack(words, self.bits, dim=1)
        part = rows, divide(columns, group, name)
        scales = _scales(source, name, (outputs, inputs // group), part)
        zeros = None
        if not self.symmetric:
            part = divide(rows, per_word, name), part[1]
            shape = -(-outputs // per_word), inputs // group
            words = source.take(f"{name}.weight_zero_point", shape, part, torch.int32)
            zeros = unpack(words, self.bits, dim=0).contiguous()
        if order is not None:
            codes = codes[:, order]
        kind = "int4" if self.bits == 4 else "int8"
        return Part(GroupedWeight(kind, pack_codes(codes, self.bits), scales, zeros), order)


class Unpacked(GroupedMethod, frozen=True):
    """naive-quantized without activations: codes `weight` in int8 or FP8, and `weight_scale`, one for each output or
    one of all."""

    integers: bool
    per_output: bool

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        check_group(source.full_name(name), -1, inputs, slice(0, inputs))
        dtype = torch.int8 if self.integers else FP8
        codes = source.take(f"{name}.weight", (outputs, inputs), (rows, columns), dtype).view(torch.uint8)
        scales = _output_scales(source, name, outputs, rows, codes, self.per_output)
        if self.integers:
            return Part(GroupedWeight("int8", codes ^ 128, scales))
        return Part(GroupedWeight("fp8", codes, scales))


class Mxfp4(GroupedMethod, frozen=True):
    """mxfp4-pack-quantized: codes `weight_packed` [outputs, inputs / 2], two in a byte, and exponents `weight_scale`
    [outputs, groups]."""

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        check_group(source.full_name(name), GROUP, inputs, columns)
        part = rows, divide(columns, 2, name)
        pairs = source.take(f"{name}.weight_packed", (outputs, inputs // 2), part, torch.uint8)
        part = rows, divide(columns, GROUP, name)
        scales = source.take(f"{name}.weight_scale", (outputs, inputs // GROUP), part, torch.uint8)
        return Part(GroupedWeight("e2m1", pack_codes(split_pairs(pairs), 4), held_exponents(scales)))


class Mxfp8(GroupedMethod, frozen=True):
    """mxfp8-quantized: codes `weight` in FP8, and exponents `weight_scale` [outputs, groups]."""

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        check_group(source.full_name(name), GROUP, inputs, columns)
        codes = source.take(f"{name}.weight", (outputs, inputs), (rows, columns), FP8).view(torch.uint8)
        part = rows, divide(columns, GROUP, name)
        scales = source.take(f"{name}.weight_scale", (outputs, inputs // GROUP), part, torch.uint8)
        return Part(GroupedWeight("fp8", codes, held_exponents(scales)))


# Formats in which a few columns share a scale, by the names of their layouts: the bits of a code, these columns, and
# the method. A config may also ask for activations of few bits. Only Blackwell's tensor cores take those, so here they
# keep the engine's dtype, as in vLLM.
_MICRO: dict[str, tuple[tuple[int, int], Method]] = {
    "mxfp4-pack-quantized": ((4, GROUP), Mxfp4()),
    "mxfp8-quantized": ((8, GROUP), Mxfp8()),
    "nvfp4-pack-quantized": ((4, NVFP4_GROUP), Nvfp4("weight_packed", "weight_global_scale", divides=True)),
}


class EightBit(ScaledMethod, frozen=True):
    """float-quantized and int-quantized: codes `weight` and `weight_scale`. tile: outputs and inputs that share a
    scale; None = all inputs of an output, or all of both. static: activations have the scale `input_scale`, and
    `input_zero_point` where they have a zero."""

    tile: tuple[int, int] | None
    per_output: bool
    static: bool

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> ScaledPart:
        shape = outputs, inputs
        codes = source.take(f"{name}.weight", shape, (rows, columns), self.rows.dtype)
        if self.tile is not None:
            weight = with_tiles(source, f"{name}.weight_scale", codes, self.tile, shape, rows, columns)
        else:
            scales = _output_scales(source, name, outputs, rows, codes, self.per_output).float()
            weight = ScaledWeight(codes, scales, (1, codes.shape[1]))
        if not self.static:
            return ScaledPart(weight)
        zero = None
        if not self.rows.symmetric:
            field = f"{name}.input_zero_point"
            zero = source.take(field, source.stored_shape(field), dtype=torch.int8).flatten()
        return ScaledPart(weight, take_one(source, f"{name}.input_scale"), zero)


class _Group(NamedTuple):
    targets: ExactOrPattern
    method: Method


class CompressedTensorsPolicy:
    def __init__(self, ignored: ExactOrPattern, groups: list[_Group]) -> None:
        self._ignored = ignored
        self._groups = groups

    def __call__(self, name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        # The tool often does not treat a router as a linear layer, and its config then does not mention it.
        if self._ignored.has(name) or not stored(f"{name}.weight_scale"):
            return DENSE
        for fits in (
            lambda targets: name in targets.exact,
            lambda targets: targets.matches(name),
            lambda targets: "Linear" in targets.exact,
        ):
            for targets, method in self._groups:
                if fits(targets):
                    return method
        return DENSE


def read_policy(fields: QuantizationFields) -> CompressedTensorsPolicy:
    for name in ("transform_config", "sparsity_config"):
        if fields.mapping(name).get("format") not in (None, "dense") or fields.mapping(name).get("config_groups"):
            raise fields.refuse(f"compressed-tensors and a {name}", _SERVED)
    groups = []
    for name, value in fields.mapping("config_groups").items():
        if not isinstance(value, dict):
            raise ConfigError(
                f"config_groups in the quantization config has {value!r} for {name!r}; it must be an object"
            )
        group = QuantizationFields(value)
        layout = str(value.get("format") or fields.fields.get("format") or "")
        groups.append(_Group(ExactOrPattern(group.names("targets")), _method(group, layout)))
    return CompressedTensorsPolicy(ExactOrPattern(fields.names("ignore")), groups)


def _method(group: QuantizationFields, layout: str) -> Method:
    if not group.mapping("weights"):
        return DENSE
    weights = QuantizationFields(group.mapping("weights"))
    kind, bits = weights.choice("type", "int", ("int", "float")), weights.count("num_bits", 8)
    symmetric = weights.flag("symmetric", True)
    default = "tensor" if weights.fields.get("group_size") is None else "group"
    strategy = weights.choice("strategy", default, ("tensor", "channel", "group", "block", "tensor_group"))
    group_size = -1 if strategy == "channel" else weights.fields.get("group_size")
    described = f"compressed-tensors weights {_describe(weights.fields)}"
    if group.fields.get("output_activations"):
        raise group.refuse(f"{described} and output activations", _SERVED)
    activations = group.mapping("input_activations")
    bits_and_group, micro = _MICRO.get(layout, (None, None))
    if micro is not None and (kind, symmetric, (bits, group_size)) == ("float", True, bits_and_group):
        return micro
    if activations:
        described += f" and activations {_describe(activations)}"
        method = _eight_bit(kind, bits, symmetric, strategy, weights, QuantizationFields(activations))
    elif layout == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        size = group_size if group_size == -1 else weights.count("group_size")
        method = Packed(bits, size, symmetric)
    elif layout != "pack-quantized" and bits == 8 and symmetric and strategy in ("tensor", "channel"):
        method = Unpacked(kind == "int", strategy == "channel")
    else:
        method = None
    if method is None:
        raise group.refuse(f"{described} in the layout {layout!r}", _SERVED)
    return method


def _eight_bit(
    kind: str, bits: int, symmetric: bool, strategy: str, weights: QuantizationFields, inputs: QuantizationFields
) -> Method | None:
    """Return the method for weights and activations of 8 bits; None for what is not served."""
    dynamic = inputs.fields.get("dynamic") is True
    by = str(inputs.fields.get("strategy") or "tensor")
    if (bits, symmetric, inputs.count("num_bits", 8)) != (8, True, 8) or inputs.fields.get("type", "int") != kind:
        return None
    tile = read_tile(weights.fields.get("block_structure")) if strategy == "block" else None
    rows = RowFormat(FP8 if kind == "float" else torch.int8, symmetric=inputs.flag("symmetric", True))
    if tile is not None:
        if not dynamic or by != "group" or inputs.fields.get("group_size") != tile[1] or kind != "float":
            return None
        return EightBit(rows._replace(group=tile[1]), tile, False, False)
    if strategy not in ("tensor", "channel") or (dynamic, by) not in ((True, "token"), (False, "tensor")):
        return None
    if kind == "float" and not rows.symmetric:
        return None
    return EightBit(rows, None, strategy == "channel", not dynamic)


def _describe(fields: dict[str, Any]) -> str:
    names = ("type", "num_bits", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
    return ", ".join(f"{name} {fields[name]}" for name in names if fields.get(name) is not None)


def _scales(source: Source, name: str, shape: tuple[int, int], part: tuple[slice, slice]) -> torch.Tensor:
    field = f"{name}.weight_scale"
    return source.take(field, shape, part, source.stored_dtype(field))


def _output_scales(
    source: Source, name: str, outputs: int, rows: slice, codes: torch.Tensor, per_output: bool
) -> torch.Tensor:
    """Return the scales of a weight's outputs, [outputs, 1]."""
    if per_output:
        return _scales(source, name, (outputs, 1), (rows, slice(0, 1)))
    return by_output(take_one(source, f"{name}.weight_scale"), codes)


def _check_shape(name: str, shape: torch.Tensor, outputs: int, inputs: int) -> None:
    if not shape.is_meta and shape.tolist() != [outputs, inputs]:
        raise ConfigError(f"{name} has the shape {shape.tolist()}; config.json calls for {[outputs, inputs]}")
