"""Finds the places in a text at which one of many other texts stands, such as the added tokens of a model."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from operator import itemgetter

_SLICE_CHARS = 16_384  # searched at a time: Python's search never releases the GIL, not even in a thread


class TextFinder:
    """Finds the first of the texts, and of those that begin at one place the longest.

    The texts' common beginnings are shared in one regular expression. A plain list of alternatives would compare each
    of them wherever one could begin. Some models have thousands, such as `<unused0>`, and a client may write their
    beginning a million times.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        found = sorted({text for text in texts if text})
        self._longest = max(map(len, found), default=0)
        self._pattern = re.compile(_any_of(found) if found else r"(?!)")

    def find_all(self, text: str, start: int = 0, end: int | None = None) -> Iterator[re.Match[str]]:
        """Yield the matches between two positions from left to right. They do not overlap."""
        end = len(text) if end is None else end
        while start < end:
            stop = min(start + _SLICE_CHARS, end)
            # One that begins before `stop` may end behind it.
            match = self._pattern.search(text, start, min(stop + self._longest, end))
            if match is None or match.start() >= stop:
                start = stop
            else:
                yield match
                start = match.end()


def _any_of(texts: Sequence[str]) -> str:
    """Return a regular expression that prefers the longest of the texts. They are sorted, and one of them may be ""."""
    branches = []
    for _, group in groupby((text for text in texts if text), key=itemgetter(0)):
        same = list(group)
        pairs = zip(same[0], same[-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        branches.append(re.escape(same[0][:shared]) + _any_of([text[shared:] for text in same]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")
