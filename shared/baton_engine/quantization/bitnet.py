"""Ternary weights of BitNet b1.58, with one scale for a whole weight, and activations in 8 bits (Ma et al., "The Era of
1-bit LLMs", 2024). They are held as int8 codes, since no kernel multiplies codes of 2 bits with rows of 8 bits."""

from collections.abc import Callable, Sequence

import torch

from baton_engine.config import ConfigError
from baton_engine.source import Method, Outputs, Product, Source
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight

from .dense import DENSE
from .fields import QuantizationFields
from .names import NotConverted
from .scaled import ScaledMethod
from .scaled_part import Part

_IN_A_BYTE = 4
_ROWS = RowFormat(torch.int8, steps=127.0)


class Packed(ScaledMethod, frozen=True):
    """Codes plus 1 `weight` [outputs / 4, inputs] uint8, and `weight_scale` [1]. The lowest two bits of the bytes
    hold the first quarter of the outputs.

    divides: whether codes are divided by the scale instead of multiplied with it.
    """

    divides: bool

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        stored = (-(-outputs // _IN_A_BYTE), inputs)
        packed = source.take(f"{name}.weight", stored, (slice(0, stored[0]), columns), torch.uint8)
        codes = torch.cat([packed >> 2 * place & 3 for place in range(_IN_A_BYTE)])[rows].to(torch.int8) - 1
        scale = source.take(f"{name}.weight_scale", (1,), dtype=torch.float32)
        return _part(codes, 1 / scale if self.divides else scale)

    def load(
        self,
        source: Source,
        taken: list[Outputs],
        inputs: int,
        columns: slice,
        bias: bool,
        order: Sequence[int] | None,
        transposed: bool,
    ) -> Product:
        """As in Method."""
        if bias and not self.divides:
            # transformers multiplies such a bias with the scale of the weight, too.
            raise ConfigError(
                f"{source.full_name(taken[0].name)} has a bias, which is not served for packed weights of linear_class "
                "autobitlinear"
            )
        return super().load(source, taken, inputs, columns, bias, order, transposed)


class Master(ScaledMethod, frozen=True):
    """Numbers `weight` from training. Their codes are the nearest of -1, 0 and 1 after a division by the mean of their
    absolute values."""

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        # The mean is that of the whole weight, on every rank.
        weight = source.take(f"{name}.weight", (outputs, inputs), dtype=torch.float32)
        factor = 1.0 / weight.abs().mean().clamp(min=1e-5)
        codes = (weight[rows, columns] * factor).round_().clamp_(-1, 1).to(torch.int8)
        return _part(codes, 1 / factor.view(1))


def _part(codes: torch.Tensor, scale: torch.Tensor) -> Part:
    return Part(ScaledWeight(codes, scale.repeat(len(codes))[:, None], (1, codes.shape[1])))


def read_policy(fields: QuantizationFields) -> Callable[[str, bool, Callable[[str], bool]], Method]:
    if fields.flag("use_rms_norm"):
        raise fields.refuse("bitnet and use_rms_norm", "Baton serves bitnet without norms of its own")
    divides = fields.choice("linear_class", "bitlinear", ("bitlinear", "autobitlinear")) == "bitlinear"
    online = fields.choice("quantization_mode", "offline", ("online", "offline")) == "online"
    left_out = NotConverted(fields.names("modules_to_not_convert"))
    packed, master = Packed(_ROWS, divides), Master(_ROWS)

    def policy(name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        if left_out.has(name):
            return DENSE
        if online and not divides:
            return DENSE if sensitive else master
        return packed if stored(f"{name}.weight_scale") else DENSE

    return policy
