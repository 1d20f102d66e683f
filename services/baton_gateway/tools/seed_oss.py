"""Tool calls of Seed-OSS: as Qwen3-Coder's, with other markers and with values that are not on lines of their own."""

from .qwen3_coder import Qwen3CoderParser


class SeedOssParser(Qwen3CoderParser):
    finish = "</seed:tool_call>"
    starts = ("<seed:tool_call>", "<function=")
    markers = ("<seed:tool_call>", finish)
    own_lines = False

    @staticmethod
    def writes(template: str) -> bool:
        return "<seed:tool_call>" in template
