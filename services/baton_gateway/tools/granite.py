"""Calls of IBM's Granite before version 4: <|tool_call|>[{"name": …, "arguments": {…}}, …]."""

from .call_rules import CallRules
from .listed import ListedParser


class GraniteParser(ListedParser):
    starts = ("<|tool_call|>",)
    markers = starts

    @staticmethod
    def writes(template: str) -> bool:
        return "<|tool_call|>" in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        head = '{{"name": "{}", "arguments": '
        return calls.listed(head=head.format, tail="}", opening="<|tool_call|>[", separator=", ", closing="]")
