"""Tool calls of DeepSeek from V3.2 on, in XML whose tags begin with `｜DSML｜`, which is one token.

Each parameter says whether its value is a string as it is (`string="true"`) or JSON. V3.2 and V4 differ in the name of
the section.
"""

import re

from .invoke import InvokeParser

TAG = "｜DSML｜"
_KEY = re.compile(r'(.*?)"?(?:\s+string="(true|false)")?', re.S)


class DeepSeekV32Parser(InvokeParser):
    starts = (f"<{TAG}function_calls>",)
    section_end = f"</{TAG}function_calls>"
    markers = (TAG,)
    call_begin, call_end = f'<{TAG}invoke name="', f"</{TAG}invoke>"
    key_begin, value_end = f'<{TAG}parameter name="', f"</{TAG}parameter>"
    before_value, before_text = '" string="false">', '" string="true">'
    opening, closing = f"<{TAG}function_calls>\n", f"\n</{TAG}function_calls>"

    @staticmethod
    def writes(template: str) -> bool:
        return TAG in template

    def _read_key(self, key: str) -> tuple[str, bool]:
        match = _KEY.fullmatch(key)
        if match is None or match[2] is None:
            return super()._read_key(key)
        return match[1], match[2] == "true"


class DeepSeekV4Parser(DeepSeekV32Parser):
    starts = (f"<{TAG}tool_calls>",)
    section_end = f"</{TAG}tool_calls>"
    opening, closing = f"<{TAG}tool_calls>\n", f"\n</{TAG}tool_calls>"

    @staticmethod
    def writes(template: str) -> bool:
        return TAG in template and "tool_calls>" in template
