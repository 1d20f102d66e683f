"""Tool calls of Qwen3-Coder, Qwen3.5 and Nemotron 3, in XML:

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

import re
from typing import ClassVar

from .call_rules import CallRules
from .key_values import KeyValueParser
from .tool_parser import LONGEST_HEAD, NAME

_HEAD = re.compile(rf"\s*(?:<function=)?({NAME})>")


class Qwen3CoderParser(KeyValueParser):
    # These models sometimes leave out the first marker.
    starts: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    finish: ClassVar[str] = "</tool_call>"
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", finish)
    key_begin, key_end, before_value, value_end = "<parameter=", ">", ">", "</parameter>"
    call_end = "</function>"
    own_lines = True

    @staticmethod
    def writes(template: str) -> bool:
        return "<function=" in template

    @classmethod
    def rules(cls, calls: CallRules) -> str:
        return calls.listed(
            head=(cls.starts[0] + "\n<function={}>\n").format,
            tail=f"</function>\n{cls.finish}",
            separator="\n",
            arguments=lambda index, schema: cls.argument_rules(calls, index, schema),
        )

    def _opened(self) -> bool:
        end = self._rest.find(">", 0, LONGEST_HEAD)
        if end < 0 and not self._ended and len(self._rest) < LONGEST_HEAD:
            return False
        head = _HEAD.fullmatch(self._rest, 0, end + 1)
        if end < 0 or head is None or head[1] not in self._functions:
            return self._reject(0)
        return self._go_keys(head[1], end + 1)

    def _after_call(self) -> bool:
        dropped = self._drop_marker(self.finish)
        return dropped is not None and self._go(self._between)
