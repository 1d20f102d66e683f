"""Tool calls of Phi-4-mini: <|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|>, or functools[…]."""

from .call_rules import CallRules
from .listed import ListedParser


class Phi4MiniParser(ListedParser):
    starts = ("<|tool_call|>", "functools")
    finish = "<|/tool_call|>"
    markers = ("<|tool_call|>", finish)

    @staticmethod
    def writes(template: str) -> bool:
        return "<|tool|>" in template

    @classmethod
    def rules(cls, calls: CallRules) -> str:
        begin, end = cls.markers if calls.lark.token(cls.markers[0]) is not None else ("functools", "")
        head = '{{"name": "{}", "arguments": '
        return calls.listed(head=head.format, tail="}", opening=begin + "[", separator=", ", closing="]" + end)
