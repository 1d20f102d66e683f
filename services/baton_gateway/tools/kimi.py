"""Tool calls of Kimi-K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}, in a section.

The text before the arguments is also the id of the call. The template writes this id into later prompts, so clients get
it.
"""

import re

from .call_rules import CallRules, json_rule
from .section import SectionParser
from .tool_parser import NAME

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiParser(SectionParser):
    starts = (SECTION,)
    markers = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
    call_begin = CALL
    head = re.compile(rf"\s*(?P<id>(?:functions\.)?(?P<name>{NAME}):[0-9]{{1,9}})\s*{re.escape(ARGUMENTS)}\s*")
    call_ends = (CALL_END,)
    section_end = SECTION_END

    @staticmethod
    def writes(template: str) -> bool:
        return CALL in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        def head(name: str) -> str:
            return f"{CALL}functions.{name}:"

        def arguments(index: int, schema: object) -> list[str]:
            return [f"arguments{index}: NUMBER {calls.lark.spell(ARGUMENTS)} json{index}"]

        rules = calls.listed(head=head, tail=CALL_END, opening=SECTION, closing=SECTION_END, arguments=arguments)
        schemas = (f"json{index}: {json_rule(schema)}" for index, schema in enumerate(calls.functions.values()))
        return "\n".join([rules, "NUMBER: /[0-9]{1,4}/", *schemas])
