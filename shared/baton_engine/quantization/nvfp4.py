"""NVFP4 (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025): e2m1 codes with an FP8 scale for every 16 of
them, and a factor for the whole weight."""

import torch

from baton_engine.config import ConfigError
from baton_engine.source import Source
from baton_kernels.reference.grouped_linear import BLOCK, GroupedWeight

from .fp8 import FP8, take_one
from .grouped import GroupedMethod, Part, check_group, pack_codes
from .mxfp4 import split_pairs
from .packed import divide

GROUP = 16
_NOT_FINITE = 127  # From this byte on, a float8_e4m3fn is negative or no number.


class Nvfp4(GroupedMethod, frozen=True):
    """Codes `codes` [outputs, inputs / 2], two in a byte, scales `weight_scale` [outputs, inputs / 16], and a number
    `factor`, with which scales are multiplied, or divided if `divides`.

    Activations are not rounded: tensor cores before Blackwell's take no e2m1.
    """

    codes: str
    factor: str
    divides: bool

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        check_group(source.full_name(name), BLOCK, inputs, columns)
        part = rows, divide(columns, 2, name)
        pairs = source.take(f"{name}.{self.codes}", (outputs, inputs // 2), part, torch.uint8)
        part = rows, divide(columns, GROUP, name)
        scales = source.take(f"{name}.weight_scale", (outputs, inputs // GROUP), part, FP8).contiguous()
        _check(source.full_name(name), scales)
        factor = take_one(source, f"{name}.{self.factor}")
        factor = 1 / factor if self.divides else factor
        codes, of_outputs = pack_codes(split_pairs(pairs), 4), factor.expand(len(scales)).contiguous()
        return Part(GroupedWeight("e2m1", codes, scales.view(torch.int16), factors=of_outputs))


def _check(name: str, scales: torch.Tensor) -> None:
    """Raise ConfigError if a scale is not a number above or at 0."""
    if not scales.is_meta and scales.view(torch.uint8).amax() >= _NOT_FINITE:
        raise ConfigError(f"{name} has scales that are negative or not finite")
