"""The formats of NVIDIA's Model Optimizer, in the layout that it exports for Hugging Face folders."""

from collections.abc import Callable
from fnmatch import fnmatchcase

from baton_engine.config import ConfigError
from baton_engine.source import Method, Source
from baton_kernels.reference.quantize import RowFormat
from baton_kernels.reference.scaled_linear import ScaledWeight

from .compressed_tensors import EightBit, Mxfp8
from .dense import DENSE
from .fields import QuantizationFields
from .fp8 import FP8
from .nvfp4 import Nvfp4
from .scaled import ScaledMethod
from .scaled_part import Part


class PerChannel(ScaledMethod, frozen=True):
    """Codes `weight`, and a scale for each output, `weight_scale` [outputs]."""

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        codes = source.take(f"{name}.weight", (outputs, inputs), (rows, columns), FP8)
        scales = source.take(f"{name}.weight_scale", (outputs,), (rows,)).float()[:, None]
        return Part(ScaledWeight(codes, scales, (1, codes.shape[1])))


_NVFP4 = Nvfp4("weight", "weight_scale_2", divides=False)
_METHODS: dict[str, Method] = {
    "FP8": EightBit(RowFormat(FP8), None, per_output=False, static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": PerChannel(RowFormat(FP8)),
    "MXFP8": Mxfp8(),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "W4A8_NVFP4_FP8": _NVFP4,
}


def read_policy(fields: QuantizationFields) -> Callable[[str, bool, Callable[[str], bool]], Method]:
    # config.json has the fields themselves; the tool's own file has them one level below.
    fields = QuantizationFields(fields.mapping("quantization") or fields.fields)
    excluded = [*fields.names("ignore"), *fields.names("exclude_modules")]
    by_layer: dict[str, Method] = {}
    whole: Method = DENSE
    if fields.fields.get("quant_algo") == "MIXED_PRECISION":
        for name, layer in fields.mapping("quantized_layers").items():
            if not isinstance(layer, dict):
                raise ConfigError(f"quantized_layers has {layer!r} for {name!r}; it must be an object")
            by_layer[name] = _method(QuantizationFields(layer))
    else:
        whole = _method(fields)

    def policy(name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        left_out = any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in excluded)
        return DENSE if left_out or not stored(f"{name}.weight_scale") else by_layer.get(name, whole)

    return policy


def _method(fields: QuantizationFields) -> Method:
    algorithm = fields.fields.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _METHODS:
        raise fields.refuse(f"Model Optimizer's {algorithm!r}", f"Baton serves {', '.join(_METHODS)}")
    return _METHODS[algorithm]
