"""Tool calls in Python between two markers: of OLMo 3, one on each line, and of LFM2, in a list."""

from typing import ClassVar

from .call_rules import CallRules
from .marked import MarkedParser
from .pythonic import PythonicParser, argument_rules


class PythonicSectionParser(MarkedParser, PythonicParser):
    """Reads such calls."""

    begin: ClassVar[str]
    finish: ClassVar[str]
    list_begin: ClassVar[str]
    separator: ClassVar[str]
    list_end: ClassVar[str]

    @classmethod
    def rules(cls, calls: CallRules) -> str:
        return calls.listed(
            head="{}(".format,
            tail=")",
            opening=cls.begin + cls.list_begin,
            separator=cls.separator,
            closing=cls.list_end + cls.finish,
            arguments=argument_rules,
        )

    def _opened(self) -> bool:
        self._opening += self._take_space()
        begin = self.list_begin.strip()
        if self._rest.startswith(begin):
            self._opening += self._take(len(begin))
            return self._go(self._function)
        return not self._may_become(begin) and self._reject(0)

    def _after_call(self) -> bool:
        text, separator = self._rest.lstrip(), self.separator.strip()
        ends = [end for end in (self.list_end.strip(), self.finish) if end]
        space = len(self._rest) - len(text)
        for end in ends:
            if text.startswith(end):
                self._drop(space + (0 if end == self.finish else len(end)))
                return self._go(self._after_list)
        if not self._ended and (not text or any(end.startswith(text) for end in ends)):
            return False
        if not text.startswith(separator) or not text:
            return self._go(self._after_list)
        self._opening = self._take(space + len(separator))
        return self._go(self._function)

    def _after_list(self) -> bool:
        return self._drop_marker(self.finish) is not None and self._go(self._between)


class Olmo3Parser(PythonicSectionParser):
    begin, finish = "<function_calls>", "</function_calls>"
    starts = (begin,)
    markers = (begin, finish)
    list_begin, separator, list_end = "", "\n", ""

    @staticmethod
    def writes(template: str) -> bool:
        return "<function_calls>" in template


class Lfm2Parser(PythonicSectionParser):
    begin, finish = "<|tool_call_start|>", "<|tool_call_end|>"
    starts = (begin,)
    markers = (begin, finish)
    list_begin, separator, list_end = "[", ", ", "]"

    @staticmethod
    def writes(template: str) -> bool:
        return "<|tool_call_start|>" in template or "<|tool_list_start|>" in template
