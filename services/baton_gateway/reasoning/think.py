"""Thoughts of Qwen3, DeepSeek-R1, GLM, MiniMax and others: <think>…</think>. The prompt may begin them."""

from typing import ClassVar

from .tagged import TaggedThoughts


class ThinkTags(TaggedThoughts):
    begin = "<think>"
    finish = "</think>"
    markers: ClassVar[tuple[str, ...]] = (begin, finish)
    calls = ("<|tool_calls_section_begin|>",)  # Kimi-K2-Thinking

    @staticmethod
    def writes(template: str) -> bool:
        return "</think>" in template
