"""Thoughts of Gemma, from Gemma 4 on: a channel named thought, whose markers are control tokens."""

from ..reading.lark import LarkSpelling
from .tagged import TaggedThoughts
from .thought_reader import Place


class GemmaThoughts(TaggedThoughts):
    begin = "<|channel>thought"
    finish = "<channel|>"
    markers = ("<|channel>", finish)
    anywhere = True

    @staticmethod
    def writes(template: str) -> bool:
        return "<|channel>" in template and "<channel|>" in template

    @classmethod
    def free_rules(cls, place: Place, lark: LarkSpelling) -> str:
        id = lark.token("<|channel>")
        if id is None:
            raise ValueError("the marker that begins thoughts is not a token of this model")
        return f"start: thoughts rest\nrest: <[^{id}]>*"
