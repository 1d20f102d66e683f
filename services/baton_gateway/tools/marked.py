"""Tool calls that begin with a marker anywhere in the text."""

from typing import ClassVar

from .tool_parser import ToolParser


class MarkedParser(ToolParser):
    """Reads calls that begin with a marker."""

    starts: ClassVar[tuple[str, ...]]  # of which each begins a call, or several

    def _at_start(self) -> bool:
        return self._between()

    def _after_call(self) -> bool:
        return self._between()

    def _after_none(self) -> bool:
        """The state in which text is content until a marker comes."""
        text = self._rest
        at = min((at for marker in self.starts if (at := text.find(marker)) >= 0), default=-1)
        if at >= 0:
            self._add_content(self._take(at))
            return self._go(self._between)
        self._add_content(self._take(len(text) - self._held(text, *self.starts)))
        return False

    def _between(self) -> bool:
        """The state before a call or between two calls, where white space is not content."""
        text = self._rest.lstrip()
        for marker in self.starts:
            if text.startswith(marker):
                self._opening = self._take(len(self._rest) - len(text) + len(marker))
                return self._go(self._opened)
        if not self._ended and any(marker.startswith(text) for marker in self.starts):
            return False
        if not text and self.count:
            self._drop(len(self._rest))
            return False
        return self._go(self._after_none)

    def _opened(self) -> bool:
        """The state after a marker."""
        self._opening += self._take_space()
        if not self._rest:
            return self._ended and self._reject(0)
        return self._go_object() if self._rest[0] == "{" else self._reject(0)

    def _drop_marker(self, marker: str) -> bool | None:
        """Drop a marker that may follow, with white space before it. Return None while it may still come."""
        text = self._rest.lstrip()
        if text.startswith(marker):
            self._drop(len(self._rest) - len(text) + len(marker))
            return True
        return None if not self._ended and marker.startswith(text) else False
