"""Tool calls of LongCat: as Hermes writes them, with other markers."""

from .hermes import HermesParser


class LongCatParser(HermesParser):
    starts = ("<longcat_tool_call>",)
    finish = "</longcat_tool_call>"
    markers = (*starts, finish)

    @staticmethod
    def writes(template: str) -> bool:
        return "<longcat_tool_call>" in template
