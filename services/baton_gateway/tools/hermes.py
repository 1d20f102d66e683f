"""Calls of Hermes, Qwen 2.5 and 3, Granite 4 and others: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from .call_rules import CallRules
from .marked import MarkedParser


class HermesParser(MarkedParser):
    starts = ("<tool_call>",)
    markers = (*starts, "</tool_call>")

    @staticmethod
    def writes(template: str) -> bool:
        return "<tool_call>" in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        head = '<tool_call>\n{{"name": "{}", "arguments": '
        return calls.listed(head=head.format, tail="}\n</tool_call>", separator="\n")

    def _after_call(self) -> bool:
        dropped = self._drop_marker(self.markers[1])
        return dropped is not None and self._go(self._between)
