"""Calls in a list behind a marker: [{"name": …, "arguments": {…}}, …]."""

from .marked import MarkedParser


class ListedParser(MarkedParser):
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
        """The state behind a marker that no list follows."""
        return super()._opened()

    def _listed(self) -> bool:
        """The state in which a list has its next call."""
        return super()._opened()

    def _after_call(self) -> bool:
        text = self._rest.lstrip()
        if not self._in_list or text[:1] not in ("", ",", "]"):
            return self._go(self._between)
        if not text:
            return self._ended and self._go(self._between)
        if text[0] == "]":
            self._drop(len(self._rest) - len(text) + 1)
            return self._go(self._between)
        self._opening = self._take(len(self._rest) - len(text) + 1)
        return self._go(self._listed)
