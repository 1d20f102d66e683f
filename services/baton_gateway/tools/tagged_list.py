"""Tool calls in a list between two tags, of Hunyuan, Jamba and Nemotron: <tool_calls>[{"name": …}, …]</tool_calls>."""

from typing import ClassVar

from .call_rules import CallRules
from .listed import ListedParser


class TaggedListParser(ListedParser):
    starts: ClassVar[tuple[str, ...]] = ("<tool_calls>",)
    finish = "</tool_calls>"
    markers: ClassVar[tuple[str, ...]] = (*starts, finish)

    @staticmethod
    def writes(template: str) -> bool:
        return "<tool_calls>" in template

    @classmethod
    def rules(cls, calls: CallRules) -> str:
        head = '{{"name": "{}", "arguments": '
        return calls.listed(
            head=head.format, tail="}", opening=cls.starts[0] + "[", separator=", ", closing="]" + cls.finish
        )


class NemotronParser(TaggedListParser):
    starts = ("<TOOLCALL>",)
    finish = "</TOOLCALL>"
    markers = (*starts, finish)

    @staticmethod
    def writes(template: str) -> bool:
        return "<TOOLCALL>" in template
