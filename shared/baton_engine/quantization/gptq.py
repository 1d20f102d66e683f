"""GPTQ (Frantar et al., 2022), in the layout of AutoGPTQ and of GPTQModel."""

import re
from collections.abc import Callable

import torch

from baton_engine.config import ConfigError
from baton_engine.source import Method, Source
from baton_kernels.reference.grouped_linear import GroupedWeight

from .dense import DENSE
from .fields import QuantizationFields
from .grouped import GroupedMethod, Part, check_group, pack_codes
from .names import check_pattern
from .packed import divide, group_order, unpack

# By the bits of a code: a word of 32 bits whose codes are all 1.
_ONES = {4: 0x11111111, 8: 0x01010101}


class Gptq(GroupedMethod, frozen=True):
    """Codes `qweight` [inputs / codes of 32 bits, outputs], `scales` [groups, outputs], `qzeros` [groups, outputs /
    codes of 32 bits], and the group of each input, `g_idx`. less_one: zeros are stored less one."""

    bits: int
    group: int
    less_one: bool

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        per_word = 32 // self.bits
        group = self.group if self.group > 0 else inputs
        g_idx = None
        if f"{name}.g_idx" in source:
            g_idx = source.take(f"{name}.g_idx", (inputs,), dtype=torch.int32)
        order = None if g_idx is None else group_order(source.full_name(name), g_idx, group)
        if order is not None and (columns.start, columns.stop) != (0, inputs):
            raise ConfigError(f"{source.full_name(name)} has inputs in order of activation (desc_act), which cannot be "
                              "divided among ranks")  # fmt: skip
        check_group(source.full_name(name), group, inputs, columns)
        part = divide(columns, per_word, name), rows
        words = source.take(f"{name}.qweight", (inputs // per_word, outputs), part, torch.int32)
        codes = unpack(words, self.bits, dim=0).t()
        part = divide(columns, group, name), rows
        scales = source.take(f"{name}.scales", (inputs // group, outputs), part, source.stored_dtype(f"{name}.scales"))
        part = part[0], divide(rows, per_word, name)
        words = source.take(f"{name}.qzeros", (inputs // group, outputs // per_word), part, torch.int32)
        if self.less_one:
            # The tool subtracts a word of ones, so that a zero of 0 borrows from its neighbour.
            words = words + _ONES[self.bits]
        zeros = unpack(words, self.bits, dim=1).t()
        if order is not None:
            codes = codes[:, order]
        kind = "int4" if self.bits == 4 else "int8"
        packed = pack_codes(codes, self.bits)
        return Part(GroupedWeight(kind, packed, scales.t().contiguous(), zeros.contiguous()), order)


class GptqPolicy:
    """The method of each module: the general one, or another one by the first pattern that matches its name."""

    def __init__(self, general: Gptq, others: list[tuple[re.Pattern[str], Gptq | None]]) -> None:
        """others: None = the module is not quantized."""
        self._general = general
        self._others = others

    def __call__(self, name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        # Tools leave modules out without saying so in the config, such as the head and routers.
        if not stored(f"{name}.qweight"):
            return DENSE
        for pattern, method in self._others:
            if pattern.match(name):
                return DENSE if method is None else method
        return self._general


def read_policy(fields: QuantizationFields) -> GptqPolicy:
    layout = fields.fields.get("checkpoint_format") or fields.fields.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise fields.refuse(f"GPTQ in the layout {layout!r}", "Baton serves gptq and gptq_v2")
    less_one = layout == "gptq"
    general = read_method(fields, less_one)
    others = []
    for pattern, changes in fields.mapping("dynamic").items():
        if not isinstance(changes, dict):
            raise ConfigError(
                f"dynamic in the quantization config has {changes!r} for {pattern!r}; it must be an object"
            )
        left_out = pattern.startswith("-:")
        changed = None if left_out else read_method(QuantizationFields({**fields.fields, **changes}), less_one)
        others.append((check_pattern(pattern.removeprefix("-:").removeprefix("+:")), changed))
    return GptqPolicy(general, others)


def read_method(fields: QuantizationFields, less_one: bool) -> Gptq:
    """less_one: as in Gptq."""
    bits = fields.count("bits")
    if bits not in (4, 8):
        raise fields.refuse(f"GPTQ in {bits} bits", "Baton serves 4 and 8 bits")
    group = fields.fields.get("group_size", 128)
    return Gptq(bits, -1 if group == -1 else fields.count("group_size", 128), less_one)
