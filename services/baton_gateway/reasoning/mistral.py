"""Thoughts of Mistral's models, from Magistral 2507 on: [THINK]…[/THINK], which are control tokens."""

from typing import Any

from .tagged import TaggedThoughts


class MistralThoughts(TaggedThoughts):
    begin = "[THINK]"
    finish = "[/THINK]"
    markers = (begin, finish)
    anywhere = True

    @staticmethod
    def writes(template: str) -> bool:
        return "[THINK]" in template

    @staticmethod
    def restored(message: dict[str, Any], thoughts: str) -> dict[str, Any]:
        """The templates take thoughts as a part of the content."""
        parts: list[dict[str, Any]] = [{"type": "thinking", "thinking": thoughts, "closed": True}]
        if message.get("content"):
            parts.append({"type": "text", "text": message["content"]})
        return {**message, "content": parts}
