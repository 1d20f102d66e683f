"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string is complete, and holds back only text that could be its beginning.

    The stop string that is complete first wins; of several that end together, the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """include: leave the stop string itself in the text."""
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text. Return the text that may be shown, and the stop string once one is complete."""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start, stop = min(matches)
            self._held = ""
            return text[: end if self._include else start], stop
        shown = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """Return the text that is still held back, since no more text will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
