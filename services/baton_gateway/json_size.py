"""Counts the objects, lists, strings and values of a JSON text, much faster than the text could be parsed."""

import re
from dataclasses import dataclass

MAX_KEY_BYTES = 64

_STRUCTURE = b'"[{,:'
_OTHERS = bytes(byte for byte in range(256) if byte not in _STRUCTURE)
# An unterminated string matches up to the end of the text. Otherwise the search would read to the end again from each
# later quote, in quadratic time. The possessive quantifier prevents backtracking.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{},:]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonSize:
    """The numbers of objects, lists, strings and values in a JSON text. For text that is not JSON they mean nothing.

    containers: objects and lists. strings: includes the keys of objects. values: an upper bound that includes the keys.
    """

    containers: int
    strings: int
    values: int

    def exceeds(self, other: "JsonSize") -> str | None:
        """Return the first limit of `other` that this size exceeds, such as "9 strings"; None when it exceeds none."""
        for name, number, limit in (
            ("strings", self.strings, other.strings),
            ("objects and lists", self.containers, other.containers),
            ("values", self.values, other.values),
        ):
            if number > limit:
                return f"{limit} {name}"
        return None


def json_size(text: bytes, max_strings: int) -> JsonSize:
    """Count the parts of a JSON text. Every step is one call in C that takes milliseconds for megabytes.

    max_strings: when the text has more strings, the other numbers stay 0, because counting them would take long.
    """
    # Pairs of backslashes are removed first. Every backslash that is left then escapes the character after it.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    structure = plain.translate(None, _OTHERS)
    strings = (structure.count(b'"') + 1) // 2
    if strings > max_strings:
        return JsonSize(0, strings, 0)
    # Every second part is outside of strings.
    outside = b"".join(structure.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    # Each value opens the text, follows a comma or a colon, or is the first in its container.
    return JsonSize(containers, strings, 1 + outside.count(b",") + outside.count(b":") + containers)


def member_beyond(text: bytes, limits: JsonSize) -> str | None:
    """Return the key of the outermost object's member in which a text exceeds one of the `limits`.

    Return None when the text exceeds no limit, or when the key is empty or longer than MAX_KEY_BYTES.
    Takes about a second for megabytes, during which other threads can run.
    """
    depth = containers = strings = values = 0
    key = last = b""
    for match in _TOKEN.finditer(text):
        token = match[0]
        match token[:1]:
            case b'"':
                strings, last = strings + 1, token
            case b"[" | b"{":
                depth, containers, values = depth + 1, containers + 1, values + 1
            case b"]" | b"}":
                depth -= 1
            case b",":
                values += 1
            case b":":
                values += 1
                key = last if depth == 1 else key
        if strings > limits.strings or containers > limits.containers or values >= limits.values:
            return key[1:-1].decode(errors="replace") if 2 < len(key) <= MAX_KEY_BYTES else None
    return None


def excess(value: object, max_values: int, max_levels: int) -> str | None:
    """Return the error message for parsed JSON with too many values or levels of nesting; None if it is within both."""
    level, count = [value], 1
    for _ in range(max_levels):
        below: list[object] = []
        for parent in level:
            if isinstance(parent, dict):
                below += parent.values()
            elif isinstance(parent, list):
                below += parent
        if not below:
            return None
        level, count = below, count + len(below)
        if count > max_values:
            return f"must hold at most {max_values} values"
    if any(isinstance(parent, dict | list) for parent in level):
        return f"must be nested at most {max_levels} levels deep"
    return None
