"""Thoughts of Granite 3.2, which separates them from the answer by two sentences."""

from .tagged import TaggedThoughts


class GraniteThoughts(TaggedThoughts):
    begin, other_begins = "Here is my thought process:", ("Here's my thought process:",)
    finish, other_finishes = "Here is my response:", ("Here's my response:",)
    markers = (begin, *other_begins, finish, *other_finishes)
    space = " \n"

    @staticmethod
    def writes(template: str) -> bool:
        return "Here is my thought process:" in template
