"""Thoughts in <think>…</think> before an answer that has tags, too, as Ernie, Granite 3.3 and Hunyuan write them."""

from typing import ClassVar

from ..reading.parts import Part
from .think import ThinkTags
from .thought_reader import Place


class AnswerTags(ThinkTags):
    """Reads such thoughts. The tags of the answer are dropped, with the line ends beside them."""

    answer_begin: ClassVar[str]
    answer_end: ClassVar[str]

    def __init__(self, place: Place) -> None:
        self._open = False  # whether the end tag of the answer is still to come
        super().__init__(place)

    def plain(self, text: str) -> Part | None:
        if not self._in_answer:
            return super().plain(text)
        if self._rest or not text:
            return None
        return text if not self._open or (self.answer_end[0] not in text and text[-1] != "\n") else None

    def _answer(self) -> bool:
        """The state at the beginning of the answer."""
        text = self._rest.lstrip()
        if text.startswith(self.answer_begin):
            self._drop(len(self._rest) - len(text) + len(self.answer_begin))
            return self._go(self._tag_read)
        if not self._ended and self.answer_begin.startswith(text):
            return False
        return self._go(self._untagged)

    def _tag_read(self) -> bool:
        self._drop_around()
        self._open = self._in_answer = bool(self._rest)
        return self._in_answer and self._go(self._in_tags)

    def _in_tags(self) -> bool:
        at = self._rest.find(self.answer_end, self._spaces)
        if at < 0:
            self._add_content(self._take(len(self._rest)) if self._ended else self._take_shown(self.answer_end))
            return False
        self._spaces = 0
        self._add_content(self._take(len(self._rest[:at].rstrip(self.space))))
        self._drop_around()
        self._drop(len(self.answer_end))
        self._open = self._in_answer = False
        return self._go(self._tag_ended)

    def _tag_ended(self) -> bool:
        self._drop_around()
        return bool(self._rest) and self._go(self._untagged)

    def _untagged(self) -> bool:
        return super()._answer()


class ResponseTags(AnswerTags):
    answer_begin, answer_end = "<response>", "</response>"
    markers = (*ThinkTags.markers, answer_begin, answer_end)

    @staticmethod
    def writes(template: str) -> bool:
        return "</think>" in template and "<response>" in template


class HunyuanThoughts(AnswerTags):
    answer_begin, answer_end = "<answer>", "</answer>"
    markers = (*ThinkTags.markers, answer_begin, answer_end)

    @staticmethod
    def writes(template: str) -> bool:
        return "</think>" in template and "<answer>" in template
