"""Tool calls of Llama from 3.1 on: the whole text is {"name": …, "parameters": {…}}, or several separated by ;."""

from .call_rules import CallRules
from .tool_parser import ToolParser


class Llama3Parser(ToolParser):
    markers = ("<|python_tag|>",)

    @staticmethod
    def writes(template: str) -> bool:
        return '"parameters"' in template and "ipython" in template

    @staticmethod
    def rules(calls: CallRules) -> str:
        return calls.listed(head='{{"name": "{}", "parameters": '.format, tail="}", separator="; ")

    def _at_start(self) -> bool:
        [marker] = self.markers
        self._opening += self._take_space()
        if self._rest.startswith(marker):
            self._opening += self._take(len(marker))
            return self._go(self._next)
        if not self._ended and marker.startswith(self._rest):
            return False
        return self._go(self._next)

    def _next(self) -> bool:
        self._opening += self._take_space()
        if not self._rest:
            return self._ended and self._reject(0)
        return self._go_object() if self._rest[0] == "{" else self._reject(0)

    def _after_call(self) -> bool:
        text = self._rest.lstrip()
        if not text:
            if self._ended:
                self._drop(len(self._rest))
            return False
        if text[0] != ";":
            return self._go(self._after_none)
        self._opening = self._take(len(self._rest) - len(text) + 1)
        return self._go(self._next)

    def _after_none(self) -> bool:
        self._add_content(self._take(len(self._rest)))
        return False
