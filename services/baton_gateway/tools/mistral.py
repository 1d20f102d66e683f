"""Tool calls of Mistral: [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name[ARGS]{…} for each."""

import re

from .call_rules import CallRules
from .listed import ListedParser
from .tool_parser import NAME

# A name before its arguments. From Mistral's tokenizer v11 on, an id and a marker may stand between the two.
_NAMED = re.compile(rf"({NAME})(?:\[CALL_ID\]([a-zA-Z0-9]{{0,64}}))?(?:\[ARGS\])?")
_MAYBE_NAMED = re.compile(r"[a-zA-Z0-9_.\-\[\]]{0,160}")


class MistralParser(ListedParser):
    starts = ("[TOOL_CALLS]",)
    markers = (*starts, "[CALL_ID]", "[ARGS]")

    @staticmethod
    def writes(template: str) -> bool:
        return "[TOOL_CALLS]" in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        if calls.lark.token("[ARGS]") is not None:
            return calls.listed(head="[TOOL_CALLS]{}[ARGS]".format, tail="")
        head = '{{"name": "{}", "arguments": '
        return calls.listed(head=head.format, tail="}", opening="[TOOL_CALLS][", separator=", ", closing="]")

    def _unlisted(self) -> bool:
        return self._go(self._named)

    def _named(self) -> bool:
        brace = self._rest.find("{")
        head = self._rest if brace < 0 else self._rest[:brace]
        if not self._ended and brace < 0 and _MAYBE_NAMED.fullmatch(head):
            return False
        named = _NAMED.fullmatch(head)
        if brace < 0 or named is None or named[1] not in self._functions:
            return self._reject(0)
        return self._go_arguments(named[1], brace)
