"""Tool calls of MiniMax-M2: <invoke name="NAME"> … </invoke> for each, between <minimax:tool_call> tags."""

from .invoke import InvokeParser


class MiniMaxParser(InvokeParser):
    starts = ("<minimax:tool_call>",)
    section_end = "</minimax:tool_call>"
    markers = (*starts, section_end)
    call_begin, call_end = '<invoke name="', "</invoke>"
    key_begin, value_end = '<parameter name="', "</parameter>"
    opening, closing = "<minimax:tool_call>\n", "\n</minimax:tool_call>"

    @staticmethod
    def writes(template: str) -> bool:
        return "<minimax:tool_call>" in template
