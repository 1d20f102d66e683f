"""Weights that are quantized while they are loaded, one projection after another.

Weights are rounded to the nearest code, without calibration. Heads and routers stay as they are. Nothing is computed
for weights on the meta device, by which loading is planned: a millisecond for each of thousands of experts is too long.
"""

from collections.abc import Callable

import torch

from baton_engine.config import ConfigError
from baton_engine.source import Method, Source
from baton_kernels.reference.grouped_linear import BLOCK, GroupedWeight
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight

from .dense import DENSE
from .grouped import GroupedMethod, Part, pack_codes
from .scaled import ScaledMethod
from .scaled_part import Part as ScaledPart

_GROUP = 64  # inputs that share a scale and a zero in INT4


class EightBit(ScaledMethod, frozen=True):
    """8-bit codes with a scale for each output, and activations with a scale for each row."""

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> ScaledPart:
        weight = _take(source, name, (outputs, inputs), (rows, columns), transposed)
        if weight.is_meta:
            return ScaledPart(ScaledWeight(weight.to(self.rows.dtype), weight[:, :1].float(), (1, weight.shape[1])))
        most = 127.0 if self.rows.dtype == torch.int8 else torch.finfo(self.rows.dtype).max
        largest = weight.abs().amax(dim=1, keepdim=True).float()
        scales = torch.where(largest == 0, 1.0, largest / most)
        codes = weight / scales
        if self.rows.dtype == torch.int8:
            codes = codes.round_()
        codes = codes.clamp_(-most, most).to(self.rows.dtype)
        return ScaledPart(ScaledWeight(codes, scales, (1, codes.shape[1])))


class FourBit(GroupedMethod, frozen=True):
    """4-bit codes: each group of inputs is divided into 16 steps from its least to its largest value; one step is 0."""

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        weight = _take(source, name, (outputs, inputs), (rows, columns), transposed)
        size = _GROUP if weight.shape[1] % _GROUP == 0 else BLOCK
        if weight.shape[1] % size:
            raise ConfigError(
                f"{source.full_name(name)} has {weight.shape[1]} inputs, which are not groups of {BLOCK}: "
                "--quantization int4 cannot store it; use int8 or fp8"
            )
        if weight.is_meta:
            each = weight[:, ::size]
            return Part(GroupedWeight("int4", weight[:, ::4].to(torch.int16), each, each.to(torch.uint8)))
        groups = weight.float().reshape(len(weight), -1, size)
        low, high = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
        scales = (high - low) / 15
        # Codes are chosen for the scales as they are stored.
        scales = torch.where(scales == 0, 1.0, scales).to(source.dtype)
        zeros = torch.round(-low / scales.float()).clamp_(0, 15)
        codes = torch.round(groups / scales.float()[..., None] + zeros[..., None]).clamp_(0, 15)
        packed = pack_codes(codes.flatten(1).to(torch.uint8), 4)
        return Part(GroupedWeight("int4", packed, scales, zeros.to(torch.uint8)))


_METHODS: dict[str, Method] = {
    "fp8": EightBit(RowFormat(torch.float8_e4m3fn)),
    "int8": EightBit(RowFormat(torch.int8)),
    "int4": FourBit(),
}


class OnLoad:
    """The policy of --quantization."""

    def __init__(self, kind: str) -> None:
        self._method = _METHODS[kind]

    def __call__(self, name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        return DENSE if sensitive else self._method


def _take(
    source: Source, name: str, shape: tuple[int, int], part: tuple[slice, slice], transposed: bool
) -> torch.Tensor:
    """Return a part of a weight that is not quantized, [outputs, inputs], in the engine's dtype."""
    field = f"{name}.weight"
    if transposed:
        return source.take(field, shape[::-1], part[::-1]).t().contiguous()
    return source.take(field, shape, part)
