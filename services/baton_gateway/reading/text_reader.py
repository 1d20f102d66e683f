"""The base class of the readers of all formats: a state machine that reads text as it arrives in pieces."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from .parts import Part, Thought


class TextReader(ABC):
    """Implements PartReader.

    A state is a method that takes what it can from the rest of the text. It returns whether the next state can go on
    with the text that is left. The result must not depend on how the text is split into pieces, and each character must
    either become part of the answer or be dropped as part of a marker.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._ended = False
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._at_start

    def push(self, text: str) -> list[Part]:
        self._rest += text
        while self._rest and self._state():
            pass
        return self._flushed()

    def end(self) -> list[Part]:
        self._ended = True
        while self._state():
            pass
        return self._flushed()

    @abstractmethod
    def _at_start(self) -> bool:
        """The state at the beginning of the text."""

    def _flushed(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _add_content(self, content: str) -> None:
        if content and self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += content
        elif content:
            self._parts.append(content)

    def _add_thought(self, text: str) -> None:
        if not text:
            return
        if self._parts and isinstance(self._parts[-1], Thought):
            text = self._parts.pop().text + text  # type: ignore[union-attr]
        self._parts.append(Thought(text))

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _take_space(self) -> str:
        return self._take(len(self._rest) - len(self._rest.lstrip()))

    def _drop(self, count: int) -> None:
        """Leave out characters that only mark parts of the answer."""
        self._rest = self._rest[count:]

    def _drop_space(self) -> None:
        self._drop(len(self._rest) - len(self._rest.lstrip()))

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _may_become(self, *markers: str) -> bool:
        """Return whether the rest may be the beginning of a marker whose other characters are still to come."""
        return not self._ended and any(marker.startswith(self._rest) for marker in markers)

    def _held(self, text: str, *markers: str) -> int:
        """Return how many characters at the end of a text may be the beginning of a marker."""
        return 0 if self._ended else max(overlap(text, marker) for marker in markers)


def overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    start = max(0, len(text) - len(marker) + 1)
    while (start := text.find(marker[0], start)) >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
