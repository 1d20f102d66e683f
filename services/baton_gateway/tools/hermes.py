"""Tool calls of Hermes, Qwen 2.5 and 3, Granite 4 and others: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from typing import ClassVar

from .call_rules import CallRules
from .marked import MarkedParser


class HermesParser(MarkedParser):
    starts: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    finish: ClassVar[str] = "</tool_call>"
    markers: ClassVar[tuple[str, ...]] = (*starts, finish)

    @staticmethod
    def writes(template: str) -> bool:
        return "<tool_call>" in template

    @classmethod
    def rules(cls, calls: CallRules) -> str:
        [start] = cls.starts
        head = start + '\n{{"name": "{}", "arguments": '
        return calls.listed(head=head.format, tail="}\n" + cls.finish, separator="\n")

    def _after_call(self) -> bool:
        dropped = self._drop_marker(self.finish)
        return dropped is not None and self._go(self._between)
