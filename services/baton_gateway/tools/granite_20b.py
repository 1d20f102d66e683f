"""Tool calls of Granite-20B-FunctionCalling: <function_call> {"name": …, "arguments": {…}} for each."""

from .call_rules import CallRules
from .marked import MarkedParser


class Granite20bParser(MarkedParser):
    starts = ("<function_call>",)
    markers = starts

    @staticmethod
    def writes(template: str) -> bool:
        return "<function_call>" in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        return calls.listed(head='<function_call> {{"name": "{}", "arguments": '.format, tail="}", separator="\n")
