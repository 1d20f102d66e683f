"""Tool calls in a section between two markers, each between two markers of its own."""

import re
from typing import ClassVar

from .marked import MarkedParser


class SectionParser(MarkedParser):
    """Reads calls whose head names the function, and whose arguments are JSON."""

    call_begin: ClassVar[str]
    head: ClassVar[re.Pattern[str]]  # the text between `call_begin` and the arguments, for `_headed`
    call_ends: ClassVar[tuple[str, ...]]  # markers that may follow the arguments, in this order
    section_end: ClassVar[str]

    def _opened(self) -> bool:
        text = self._rest.lstrip()
        if text.startswith(self.call_begin):
            return self._go_head(len(self._rest) - len(text))
        if not self._ended and self.call_begin.startswith(text):
            return False
        return self._reject(0)

    def _go_head(self, space: int) -> bool:
        self._opening += self._take(space + len(self.call_begin))
        return self._go(self._head)

    def _head(self) -> bool:
        return self._headed(self.head)

    def _after_call(self) -> bool:
        self._ends = list(self.call_ends)
        return self._go(self._call_end)

    def _call_end(self) -> bool:
        while self._ends:
            if self._drop_marker(self._ends[0]) is None:
                return False
            del self._ends[0]
        return self._go(self._next_call)

    def _next_call(self) -> bool:
        """The state after the end of a call."""
        text = self._rest.lstrip()
        if text.startswith(self.call_begin):
            return self._go_head(len(self._rest) - len(text))
        if text.startswith(self.section_end):
            self._drop(len(self._rest) - len(text) + len(self.section_end))
        elif not self._ended and (self.call_begin.startswith(text) or self.section_end.startswith(text)):
            return False
        return self._go(self._between)
