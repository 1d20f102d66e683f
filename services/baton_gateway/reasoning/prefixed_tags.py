"""Thoughts between tags as <think>…</think>, but with a prefix of the model's name: Seed-OSS and LongCat."""

from .tagged import TaggedThoughts


class SeedThoughts(TaggedThoughts):
    begin, finish = "<seed:think>", "</seed:think>"
    markers = (begin, finish)

    @staticmethod
    def writes(template: str) -> bool:
        return "<seed:think>" in template


class LongCatThoughts(TaggedThoughts):
    begin, finish = "<longcat_think>", "</longcat_think>"
    markers = (begin, finish)

    @staticmethod
    def writes(template: str) -> bool:
        return "<longcat_think>" in template
