"""Tool calls in a list after a marker: [{"name": …, "arguments": {…}}, …]."""

from typing import ClassVar

from .marked import MarkedParser


class ListedParser(MarkedParser):
    finish: ClassVar[str] = ""  # a marker that may follow the list; empty = there is none
    _in_list = False

    def _opened(self) -> bool:
        self._opening += self._take_space()
        if not self._rest:
            return self._ended and self._reject(0)
        self._in_list = self._rest[0] == "["
        if not self._in_list:
            return self._unlisted()
        self._opening += self._take(1)
        return self._go(self._listed)

    def _unlisted(self) -> bool:
        """The state after a marker that no list follows."""
        return super()._opened()

    def _listed(self) -> bool:
        """The state in which a list has its next call."""
        return super()._opened()

    def _after_call(self) -> bool:
        text = self._rest.lstrip()
        if not self._in_list or text[:1] not in ("", ",", "]"):
            return self._go(self._after_list)
        if not text:
            return self._ended and self._go(self._between)
        if text[0] == "]":
            self._drop(len(self._rest) - len(text) + 1)
            return self._go(self._after_list)
        self._opening = self._take(len(self._rest) - len(text) + 1)
        return self._go(self._listed)

    def _after_list(self) -> bool:
        if self.finish and self._drop_marker(self.finish) is None:
            return False
        return self._go(self._between)
