"""Text that records for every character whether it comes from the chat template or from the request.

A rendered prompt mixes the template's own text with strings of the request, and only the template may write control
tokens. So the template's literals are `TemplateText`, and a plain `str` counts as the request's. An operation that
this class does not implement returns a plain `str`. The result then counts as the request's text, which is safe.
"""

from collections.abc import Iterable
from typing import Any, Self, SupportsIndex

OWN = b"\x01"


class TemplateText(str):
    """Text with its origin. own: a byte per character, 1 where the template wrote it and 0 where the request did."""

    own: bytes

    def __new__(cls, text: str = "", own: bytes | None = None) -> Self:
        made = super().__new__(cls, text)
        made.own = bytes(len(made)) if own is None else own
        return made

    @classmethod
    def written(cls, text: str) -> Self:
        """Return text that the template itself wrote."""
        return cls(text, OWN * len(text))

    @property
    def plain(self) -> str:
        """The text as a `str`, without its origin."""
        return "".join((self,))

    def has_own(self, start: int, end: int) -> bool:
        """Return whether the template wrote all characters of a span."""
        return self.own.count(OWN, start, end) == end - start

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> "TemplateText":
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "TemplateText":
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> "TemplateText":
        text = super().__getitem__(key)
        return TemplateText(text, self.own[key] if isinstance(key, slice) else bytes((self.own[key],)))

    def join(self, parts: Iterable[str], /) -> "TemplateText":
        joined: list[str] = []
        for part in parts:
            joined += (self, part) if joined else (part,)
        return concat(joined)

    def lstrip(self, chars: str | None = None, /) -> "TemplateText":
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> "TemplateText":
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> "TemplateText":
        return self.lstrip(chars).rstrip(chars)

    def upper(self) -> "TemplateText":
        return self._recased(super().upper())

    def lower(self) -> "TemplateText":
        return self._recased(super().lower())

    def capitalize(self) -> "TemplateText":
        return self._recased(super().capitalize())

    def replace(self, old: str, new: str, /, count: Any = -1) -> str:
        if not old:
            return super().replace(old, new, count)
        pieces: list[str] = []
        at = 0
        while count != 0 and (found := self.find(old, at)) >= 0:
            pieces += (self[at:found], new)
            at = found + len(old)
            count -= 1
        return concat([*pieces, self[at:]])

    def _recased(self, text: str) -> "TemplateText":
        # Some letters become several characters in the other case. Then the positions no longer match.
        return TemplateText(text, self.own if len(text) == len(self) else None)


def concat(pieces: Iterable[str]) -> TemplateText:
    """Join texts, each with its origin."""
    text: list[str] = []
    own: list[bytes] = []
    for piece in pieces:
        text.append(piece)
        own.append(piece.own if isinstance(piece, TemplateText) else bytes(len(piece)))
    return TemplateText("".join(text), b"".join(own))
