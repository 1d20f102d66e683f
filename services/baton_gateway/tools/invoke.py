"""Tool calls in XML, in a section: <invoke name="NAME">, and <parameter name="KEY">VALUE</parameter> per argument."""

import re
from typing import ClassVar

from .call_rules import CallRules
from .key_values import KeyValueParser
from .section import SectionParser
from .tool_parser import LONGEST_HEAD, NAME

_HEAD = re.compile(rf"\s*({NAME})[\"']?\s*>")


class InvokeParser(SectionParser, KeyValueParser):
    """Reads such calls. The tags have a prefix that depends on the model."""

    key_end, before_value = ">", '">'
    call_ends: ClassVar[tuple[str, ...]] = ()
    # The texts between which the model writes all calls, and the text between two of them.
    opening: ClassVar[str]
    separator: ClassVar[str] = "\n"
    closing: ClassVar[str]

    @classmethod
    def rules(cls, calls: CallRules) -> str:
        return calls.listed(
            head=lambda name: f'{cls.call_begin}{name}">\n',
            tail="".join((cls.call_end, *cls.call_ends)),
            opening=cls.opening,
            separator=cls.separator,
            closing=cls.closing,
            arguments=lambda index, schema: cls.argument_rules(calls, index, schema),
        )

    def _head(self) -> bool:
        end = self._rest.find(">", 0, LONGEST_HEAD)
        if end < 0 and not self._ended and len(self._rest) < LONGEST_HEAD:
            return False
        head = _HEAD.fullmatch(self._rest, 0, end + 1)
        if head is None or head[1] not in self._functions:
            return self._reject(0)
        return self._go_keys(head[1], end + 1)

    def _read_key(self, key: str) -> tuple[str, bool]:
        return super()._read_key(key.rstrip("\"'"))
