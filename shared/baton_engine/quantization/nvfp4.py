"""NVFP4 (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025): e2m1 codes with an FP8 scale for every 16 of
them, and a factor for the whole weight."""

import torch

from baton_engine.config import ConfigError
from baton_engine.source import Source
from baton_kernels.reference.grouped_linear import BLOCK, E2M1, GroupedWeight

from .fp8 import FP8, take_one
from .grouped import GroupedMethod, Part, check_group, pack_codes
from .mxfp4 import split_pairs
from .packed import divide

GROUP = 16
# Above 0, no float8_e4m3fn from this byte on is a number, and none is larger than 448.
_NOT_FINITE, _MOST = 127, 448.0


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
        factor = take_one(source, f"{name}.{self.factor}")
        factor = 1 / factor if self.divides else factor
        table = None if _fits(source.full_name(name), scales, factor) else torch.tensor(E2M1, device=scales.device)
        return Part(
            GroupedWeight(
                "e2m1" if table is None else "table", pack_codes(split_pairs(pairs), 4), scales.view(torch.int16),
                table=table, factors=factor.expand(len(scales)).contiguous(),
            )
        )  # fmt: skip


def _fits(name: str, scales: torch.Tensor, factor: torch.Tensor) -> bool:
    """Whether the scales, [outputs, groups], times the factor, [1], are as small as those of kind "e2m1" have to be.

    Raises ConfigError if one is not a number above or at 0.
    """
    if scales.is_meta:
        return True
    largest, most = int(scales.view(torch.uint8).amax()), float(factor)
    if largest >= _NOT_FINITE or not 0 <= most < float("inf"):
        raise ConfigError(f"{name} has scales that are negative or not finite")
    return most * _MOST < 2
