"""Tool calls of IBM's Granite before version 4: <|tool_call|>[{"name": …, "arguments": {…}}, …].

From 3.1 on the models sometimes spell the marker as <tool_call>. Granite 4 writes calls as Hermes does.
"""

from .call_rules import CallRules
from .listed import ListedParser


class GraniteParser(ListedParser):
    starts = ("<|tool_call|>", "<tool_call>")
    finish = "</tool_call>"
    markers = (*starts, finish)

    @staticmethod
    def writes(template: str) -> bool:
        return "<|tool_call|>" in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        head = '{{"name": "{}", "arguments": '
        return calls.listed(head=head.format, tail="}", opening="<|tool_call|>[", separator=", ", closing="]")
