"""FP8 weights of FBGEMM, with a scale for each output, and activations whose size is bounded (Meta's Llama 3.1)."""

from collections.abc import Callable

import torch

from baton_engine.source import Method, Source
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight

from .dense import DENSE
from .fields import QuantizationFields
from .fp8 import FP8
from .names import NotConverted
from .scaled import ScaledMethod
from .scaled_part import Part


class FbgemmFp8(ScaledMethod, frozen=True):
    """Codes `weight`, and their scales `weight_scale` [outputs, 1]."""

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        codes = source.take(f"{name}.weight", (outputs, inputs), (rows, columns), FP8)
        scales = source.take(f"{name}.weight_scale", (outputs, 1), (rows, slice(0, 1)), torch.float32)
        return Part(ScaledWeight(codes, scales, (1, codes.shape[1])))


def read_policy(fields: QuantizationFields) -> Callable[[str, bool, Callable[[str], bool]], Method]:
    method = FbgemmFp8(RowFormat(FP8, most=fields.number("activation_scale_ub", 1200.0)))
    left_out = NotConverted(fields.names("modules_to_not_convert"))

    def policy(name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        return DENSE if left_out.has(name) or not stored(f"{name}.weight_scale") else method

    return policy
