"""AutoRound (Cheng et al., 2023): rounding that is learned, stored in the layouts of GPTQ, AWQ or FP8 with tiles."""

import re
from collections.abc import Callable

from baton_engine.config import ConfigError
from baton_engine.source import Method

from . import awq, gptq
from .dense import DENSE
from .fields import QuantizationFields
from .fp8 import read_policy as read_fp8_policy
from .names import check_pattern

# The layouts that parts of packing_format name, the most specific part first. Other parts are names of kernels.
_LAYOUTS = {"auto_awq": "awq", "awq": "awq", "gptqmodel": "gptq_v2", "auto_gptq": "gptq", "gptq": "gptq", "fp8": "fp8"}
_OTHER_LAYOUTS = ("llm_compressor", "fake")
_REGEX_CHARS = frozenset("*+?^$()[]{}|\\")


class AutoRoundPolicy:
    """The method of each module.

    by_name: of modules with these names. by_pattern: of modules in whose names a regular expression is found. general:
    of all others.
    """

    def __init__(
        self, general: Method, by_name: dict[str, Method], by_pattern: list[tuple[re.Pattern[str], Method]]
    ) -> None:
        self._general, self._by_name, self._by_pattern = general, by_name, by_pattern

    def __call__(self, name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        if not stored(f"{name}.qweight"):
            return DENSE
        if name in self._by_name:
            return self._by_name[name]
        return next((method for pattern, method in self._by_pattern if pattern.search(name)), self._general)


def read_policy(fields: QuantizationFields) -> Callable[[str, bool, Callable[[str], bool]], Method]:
    # Older versions call it the backend.
    packing = str(fields.fields.get("packing_format") or fields.fields.get("backend") or "auto_round:auto_gptq")
    parts = packing.split(":")
    layout = next((_LAYOUTS[part] for part in _LAYOUTS if part in parts), "gptq_v2")
    if layout == "fp8":
        return read_fp8_policy(fields)
    numbers = fields.fields.get("data_type", "int")
    if numbers != "int" or any(part in _OTHER_LAYOUTS for part in parts):
        raise fields.refuse(
            f"AutoRound's {numbers!r} in the layout {packing!r}",
            "Baton serves its integers of 4 and 8 bits, its FP8 with tiles, and what it exports as llm_compressor",
        )
    by_name, by_pattern = {}, []
    for name, changes in fields.mapping("extra_config").items():
        if not isinstance(changes, dict):
            raise ConfigError(
                f"extra_config in the quantization config has {changes!r} for {name!r}; it must be an object"
            )
        changed = QuantizationFields(
            {**fields.fields, **{key: changes[key] for key in changes if changes[key] is not None}}
        )
        if changed.count("bits") >= 16:
            continue  # It is not quantized, as its tensors show.
        method = _method(changed, layout)
        if _REGEX_CHARS.isdisjoint(name):
            by_name[name] = method
        else:
            by_pattern.append((check_pattern(name), method))
    return AutoRoundPolicy(_method(fields, layout), by_name, by_pattern)


def _method(fields: QuantizationFields, layout: str) -> Method:
    return awq.read_method(fields) if layout == "awq" else gptq.read_method(fields, less_one=layout == "gptq")
