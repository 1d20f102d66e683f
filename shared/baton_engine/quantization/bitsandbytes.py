"""NF4 and FP4 (Dettmers et al., "QLoRA", 2023) and INT8 (Dettmers et al., "LLM.int8()", 2022) of bitsandbytes.

LLM.int8() rounds activations that are not outliers to 8 bits. Here no activations are rounded.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from baton_engine.config import ConfigError
from baton_engine.source import Method, Source
from baton_kernels.reference.grouped_linear import BLOCK, GroupedWeight

from .dense import DENSE
from .fields import QuantizationFields
from .grouped import GroupedMethod, Part, check_group, pack_codes
from .names import NotConverted

_BLOCK_SIZE = 64  # codes that share a scale, where the checkpoint says nothing else


class FourBit(GroupedMethod, frozen=True):
    """Codes `weight` [outputs * inputs / 2, 1], two in a byte, `weight.quant_map` [16], the value of each code, and
    scales `weight.absmax`, which may be codes of 8 bits themselves, as `weight.quant_state.bitsandbytes__KIND` says."""

    kind: str  # nf4 or fp4

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        full = source.full_name(name)
        state = _read_state(source, f"{name}.weight.quant_state.bitsandbytes__{self.kind}")
        size = state.blocksize
        if size < BLOCK or inputs % size or state.shape not in ([], [outputs, inputs]):
            raise ConfigError(f"{full} has the shape {state.shape} in blocks of {size}; config.json calls for "
                              f"{[outputs, inputs]}, and blocks must fill its rows")  # fmt: skip
        check_group(full, size, inputs, columns)
        groups = inputs // size
        scales = _read_scales(source, name, outputs * groups, state).view(outputs, groups)
        stored = (outputs * inputs // 2, 1)
        # bitsandbytes can also store the same bytes in other dtypes, which Baton does not read.
        dtype = source.stored_dtype(f"{name}.weight")
        if dtype != torch.uint8:
            raise ConfigError(f"{full}.weight stores its codes as {dtype}; Baton serves bnb_4bit_quant_storage uint8")
        pairs = source.take(f"{name}.weight", stored, dtype=torch.uint8).view(outputs, inputs // 2)
        # The high half of a byte comes first.
        codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(1)[rows, columns]
        table = source.take(f"{name}.weight.quant_map", (16,), dtype=torch.float32)
        first, last = columns.start // size, columns.stop // size
        return Part(GroupedWeight("table", pack_codes(codes, 4), scales[rows, first:last].contiguous(), None, table))


class EightBit(GroupedMethod, frozen=True):
    """Codes `weight` [outputs, inputs] int8, and the largest number of each output, `SCB` [outputs], whose code is
    127."""

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        check_group(source.full_name(name), -1, inputs, slice(0, inputs))
        codes = source.take(f"{name}.weight", (outputs, inputs), (rows, columns), torch.int8)
        if f"{name}.weight_format" in source:
            # 0 stands for rows; other orders are of older GPUs.
            layout = source.take(f"{name}.weight_format", (), dtype=torch.uint8)
            if not layout.is_meta and int(layout):
                raise ConfigError(
                    f"{source.full_name(name)} has its weights in an order of older GPUs; Baton serves rows"
                )
        largest = source.take(f"{name}.SCB", (outputs,), (rows,), torch.float32)
        return Part(GroupedWeight("int8", codes.view(torch.uint8) ^ 128, (largest / 127)[:, None]))


class _State(msgspec.Struct):
    """What quant_state says, as JSON."""

    blocksize: int = _BLOCK_SIZE
    shape: list[int] = []
    nested_blocksize: int = 256
    nested_offset: float = 0.0


def _read_state(source: Source, name: str) -> _State:
    text = source.take(name, source.stored_shape(name), dtype=torch.uint8)
    if text.is_meta:
        return _State()
    try:
        return msgspec.json.decode(bytes(text.flatten().tolist()), type=_State)
    except ValueError as error:
        raise ConfigError(f"{source.full_name(name)} is not the JSON of bitsandbytes: {error}") from None


def _read_scales(source: Source, name: str, count: int, state: _State) -> torch.Tensor:
    name = f"{name}.weight"
    if source.stored_dtype(f"{name}.absmax") != torch.uint8:
        return source.take(f"{name}.absmax", (count,), dtype=torch.float32)
    codes = source.take(f"{name}.absmax", (count,), dtype=torch.uint8)
    table = source.take(f"{name}.nested_quant_map", (256,), dtype=torch.float32)
    per_scale = max(state.nested_blocksize, 1)
    largest = source.take(f"{name}.nested_absmax", (-(-count // per_scale),), dtype=torch.float32)
    return table[codes.int()] * largest.repeat_interleave(per_scale)[:count] + state.nested_offset


def read_policy(fields: QuantizationFields) -> Callable[[str, bool, Callable[[str], bool]], Method]:
    eight = fields.flag("load_in_8bit") or fields.flag("_load_in_8bit")
    method: Any = EightBit() if eight else FourBit(fields.choice("bnb_4bit_quant_type", "fp4", ("fp4", "nf4")))
    left_out = NotConverted(fields.names("llm_int8_skip_modules"))

    def policy(name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        # Tools do not quantize the head, and llm_int8_skip_modules does not mention it.
        quantized = stored(f"{name}.SCB") if eight else stored(f"{name}.weight.absmax")
        return DENSE if left_out.has(name) or not quantized else method

    return policy
