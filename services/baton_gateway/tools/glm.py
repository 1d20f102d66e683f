"""Tool calls of GLM from 4.5 on: <tool_call>NAME, and <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> per argument.

Version 4.5 puts them on lines of their own, later ones do not.
"""

import re

from .call_rules import CallRules
from .key_values import KeyValueParser
from .tool_parser import LONGEST_HEAD, NAME

_HEAD = re.compile(rf"\s*({NAME})\s*")


class GlmParser(KeyValueParser):
    starts = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    key_begin, key_end, value_end = "<arg_key>", "</arg_key>", "</arg_value>"
    before_value = "</arg_key>\n<arg_value>"
    call_end = "</tool_call>"

    @staticmethod
    def writes(template: str) -> bool:
        return "<arg_key>" in template

    @classmethod
    def rules(cls, calls: CallRules) -> str:
        return calls.listed(
            head="<tool_call>{}\n".format,
            tail="</tool_call>",
            separator="\n",
            arguments=lambda index, schema: cls.argument_rules(calls, index, schema),
        )

    def _opened(self) -> bool:
        end = self._rest.find("<", 0, LONGEST_HEAD)
        if end < 0 and not self._ended and len(self._rest) < LONGEST_HEAD:
            return False
        head = _HEAD.fullmatch(self._rest, 0, max(end, 0))
        if head is None or head[1] not in self._functions:
            return self._reject(0)
        return self._go_keys(head[1], end)

    def _before_value(self) -> bool:
        """The state after a key, where the tag of the value must follow."""
        text, tag = self._rest.lstrip(), "<arg_value>"
        if text.startswith(tag):
            self._source.append(self._take(len(self._rest) - len(text) + len(tag)))
            return self._go(self._value)
        if not self._ended and tag.startswith(text):
            return False
        return self._break()

    def _value(self) -> bool:
        return super()._before_value()
