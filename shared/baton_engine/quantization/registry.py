"""How the weights of a model are stored: as its quantization config says, or as the operator requests.

The module of a format is imported only when a model is stored in it.
"""

import math
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.config_file import ConfigFile
from baton_engine.loading import PLAIN, TensorBytes, dtype_name
from baton_engine.source import Policy

from .dense import as_stored
from .fields import QuantizationFields, quantization_of
from .int8_on_cpu import has_int8_products

# For each quant_method, the module in this package whose function `read_policy` reads the config.
FORMATS = {
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fbgemm_fp8",
    "gptq": "gptq",
    "awq": "awq",
    "mxfp4": "mxfp4",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "bitsandbytes": "bitsandbytes",
    "bitnet": "bitnet",
    "auto-round": "auto_round",
    "intel/auto-round": "auto_round",
}
# The formats of --quantization, for weights that are not quantized.
ON_LOAD = ("fp8", "int8", "int4")
# Files beside config.json in which older tools describe their format, and the format.
_OLDER_FILES = {
    "quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt",
}  # fmt: skip


class Quantization(NamedTuple):
    """How the weights of a model are stored. name: "none", a key of FORMATS, or one of ON_LOAD after "on load: ". bits:
    of a code, where codes are stored in words of 32 bits or made on load."""

    name: str
    policy: Policy
    bits: int = 4

    def describe(self, dtype: torch.dtype, keeps_codes: bool) -> str:
        """Return how the weights are held in memory, in words. keeps_codes: as Ops say it."""
        numbers = dtype_name(dtype)
        if self.name == "none":
            return numbers
        if keeps_codes:
            return f"{self._held_bits}-bit codes ({self.name})"
        kept = f"int8 or {numbers}" if self._keeps_int8 else numbers
        return f"{kept} from {self.bits}-bit codes ({self.name})"

    def sizes(self, dtype: torch.dtype, device: torch.device) -> TensorBytes:
        """Return how many bytes tensors take on a device.

        A GPU keeps codes as they are. A CPU keeps int8 if it has fast products for it, and dequantizes other codes to
        the engine's dtype. Scales count as if they were weights, and heads and embeddings as if they were quantized on
        load; neither makes much of a difference.
        """
        on_cpu = device.type == "cpu"
        keeps_int8 = on_cpu and self._keeps_int8

        def size(stored: torch.dtype, shape: tuple[int, ...]) -> float:
            elements = math.prod(shape)
            if stored in PLAIN:
                # Tensors with the weights of several experts have three dimensions. No CPU keeps their codes.
                kept = keeps_int8 and len(shape) == 2 if on_cpu else len(shape) > 1
                on_load = self.name.startswith("on load") and kept
                return elements * (self.bits / 8 if on_load else dtype.itemsize)
            if not on_cpu or (stored == torch.int8 and keeps_int8):
                return elements * stored.itemsize * (self._held_bits / self.bits if stored == torch.uint8 else 1)
            codes = {torch.int32: 32 // self.bits, torch.uint8: 4 if self.bits == 2 else 2}
            return elements * codes.get(stored, 1) * dtype.itemsize

        return size

    @property
    def _held_bits(self) -> int:
        """The bits of a code in a GPU's memory. Codes of 2 bits become int8, because no kernel reads them."""
        return 8 if self.bits == 2 else self.bits

    @property
    def _keeps_int8(self) -> bool:
        """Whether a CPU keeps codes that are int8."""
        return self.name in ("compressed-tensors", "on load: int8", "bitnet") and has_int8_products()


def read_quantization(folder: Path, requested: str = "auto") -> Quantization:
    """Return how the weights of a model folder are held.

    requested: "auto" = as they are stored; otherwise one of ON_LOAD. Raises ConfigError for what is not served.
    """
    return parse_quantization(ConfigFile.read(folder).fields, requested, folder)


def parse_quantization(config: dict[str, Any], requested: str = "auto", folder: Path | None = None) -> Quantization:
    """As read_quantization, from the contents of a config.json."""
    fields = _fields(config, folder)
    if requested != "auto":
        return _on_load(requested, fields)
    if fields is None:
        return Quantization("none", as_stored)
    method = fields.fields.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise fields.refuse(f"{method!r}", f"Baton serves {', '.join(FORMATS)}, and weights that are not quantized")
    module = import_module(f".{FORMATS[method]}", __package__)
    return Quantization(method, cast(Policy, module.read_policy(fields)), _bits(fields))


def _bits(fields: QuantizationFields) -> int:
    """Return the bits of a code, as far as the config says."""
    if fields.fields.get("quant_method") == "bitnet":
        return 2
    groups = [group for group in fields.mapping("config_groups").values() if isinstance(group, dict)]
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]
    found = [fields.fields.get("bits"), fields.fields.get("w_bit"), *(each.get("num_bits") for each in weights)]
    algorithm = fields.fields.get("quant_algo") or fields.mapping("quantization").get("quant_algo")
    eight = "fp8" in str(fields.fields.get("quant_method")) or fields.fields.get("load_in_8bit") is True
    eight = eight or str(algorithm).startswith(("FP8", "MXFP8"))
    return 8 if eight or 8 in found else 4


def _on_load(requested: str, fields: QuantizationFields | None) -> Quantization:
    if requested not in ON_LOAD:
        raise ConfigError(f"--quantization {requested!r} is unknown; use auto, {', '.join(ON_LOAD)}")
    if fields is not None:
        method = fields.fields.get("quant_method")
        raise ConfigError(
            f"--quantization {requested} is for weights that are not quantized, but these are quantized already "
            f"({method}): leave it out"
        )
    from .on_load import OnLoad

    return Quantization(f"on load: {requested}", OnLoad(requested), 4 if requested == "int4" else 8)


def _fields(config: dict[str, Any], folder: Path | None) -> QuantizationFields | None:
    """Return the quantization config of a model; None if it has none."""
    found = quantization_of(config)
    if found is None and folder is not None:
        for name, method in _OLDER_FILES.items():
            if (folder / name).exists():
                found = {"quant_method": method, **_read(folder / name)}
                break
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ConfigError("quantization_config in config.json is not a JSON object")
    return QuantizationFields(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from None
