"""Tool calls of DeepSeek-V3, R1 and V3.1, in a section whose markers are control tokens.

V3.1 writes `name<｜tool▁sep｜>{…}` for each call, its predecessors `function<｜tool▁sep｜>name` and the arguments in a
block of Markdown.
"""

import re
from typing import ClassVar

from .call_rules import CallRules
from .section import SectionParser
from .tool_parser import NAME

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekParser(SectionParser):
    starts = (SECTION,)
    markers = (SECTION, SECTION_END, CALL, SEPARATOR, CALL_END)
    call_begin = CALL
    head = re.compile(rf"\s*(?P<name>{NAME}){SEPARATOR}\s*")
    call_ends: ClassVar[tuple[str, ...]] = (CALL_END,)
    section_end = SECTION_END

    @staticmethod
    def writes(template: str) -> bool:
        return CALL in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        return calls.listed(head=f"{CALL}{{}}{SEPARATOR}".format, tail=CALL_END, opening=SECTION, closing=SECTION_END)


class DeepSeekV3Parser(DeepSeekParser):
    head = re.compile(rf"\s*function{SEPARATOR}\s*(?P<name>{NAME})\s*(?:```(?:json)?)?\s*")
    call_ends = ("```", CALL_END)

    @staticmethod
    def writes(template: str) -> bool:
        return CALL in template and "```json" in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        return calls.listed(
            head=f"{CALL}function{SEPARATOR}{{}}\n```json\n".format,
            tail=f"\n```{CALL_END}",
            opening=SECTION,
            separator="\n",
            closing=SECTION_END,
        )
