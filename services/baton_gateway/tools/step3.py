"""Tool calls of Step-3: XML with the prefix `steptml:`, each call and the section between control tokens."""

from .invoke import InvokeParser


class Step3Parser(InvokeParser):
    starts = ("<｜tool_calls_begin｜>",)
    section_end = "<｜tool_calls_end｜>"
    markers = (*starts, section_end, "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")
    call_begin, call_end = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', "</steptml:invoke>"
    call_ends = ("<｜tool_call_end｜>",)
    key_begin, value_end = '<steptml:parameter name="', "</steptml:parameter>"
    opening, closing = "<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>"

    @staticmethod
    def writes(template: str) -> bool:
        return "steptml:" in template
