"""AWQ (Lin et al., 2023), in the layout that AutoAWQ calls GEMM."""

from collections.abc import Callable

import torch

from baton_engine.source import Method, Source
from baton_kernels.reference.grouped_linear import GroupedWeight

from .dense import DENSE
from .fields import QuantizationFields
from .grouped import GroupedMethod, Part, check_group, pack_codes
from .names import NotConverted
from .packed import divide, unpack

# The place in a word, counted from its lowest bits, of each of eight neighbouring outputs.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(GroupedMethod, frozen=True):
    """Codes `qweight` [inputs, outputs / 8], `scales` [groups, outputs] and `qzeros` [groups, outputs / 8]."""

    group: int

    def read(
        self, source: Source, name: str, outputs: int, inputs: int, rows: slice, columns: slice, transposed: bool
    ) -> Part:
        group = check_group(source.full_name(name), self.group, inputs, columns)
        words_of = divide(rows, 8, name)
        words = source.take(f"{name}.qweight", (inputs, outputs // 8), (columns, words_of), torch.int32)
        codes = unpack(words, 4, 1, _ORDER).t()
        groups = divide(columns, group, name)
        words = source.take(f"{name}.qzeros", (inputs // group, outputs // 8), (groups, words_of), torch.int32)
        zeros = unpack(words, 4, 1, _ORDER).t()
        scales = source.take(
            f"{name}.scales", (inputs // group, outputs), (groups, rows), source.stored_dtype(f"{name}.scales")
        )
        weight = GroupedWeight("int4", pack_codes(codes, 4), scales.t().contiguous(), zeros.contiguous())
        return Part(weight)


def read_method(fields: QuantizationFields) -> Awq:
    # The older file has shorter names.
    bits = fields.count("bits" if "bits" in fields.fields else "w_bit", 4)
    if bits != 4:
        raise fields.refuse(f"AWQ in {bits} bits", "Baton serves 4 bits")
    name = "group_size" if "group_size" in fields.fields else "q_group_size"
    return Awq(-1 if fields.fields.get(name) == -1 else fields.count(name, 128))


def read_policy(fields: QuantizationFields) -> Callable[[str, bool, Callable[[str], bool]], Method]:
    version = str(fields.fields.get("version") or "gemm").lower()
    if version != "gemm":
        raise fields.refuse(f"AWQ in the layout {version!r}", "Baton serves gemm")
    method = read_method(fields)
    left_out = NotConverted(fields.names("modules_to_not_convert"))

    def policy(name: str, sensitive: bool, stored: Callable[[str], bool]) -> Method:
        # The tool leaves the head out without saying so.
        return DENSE if left_out.has(name) or not stored(f"{name}.qweight") else method

    return policy
