"""How much a JSON text holds, counted much faster than the text could be parsed."""

import re
from dataclasses import dataclass

MAX_KEY_BYTES = 64

_STRUCTURE = b'"[{,:'
_OTHERS = bytes(byte for byte in range(256) if byte not in _STRUCTURE)
# A string that never ends matches to the end of the text. Otherwise the search would read on to there from each of its
# quotes, in quadratic time. The possessive quantifier leaves nothing to backtrack to.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{},:]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonSize:
    """The numbers of objects, lists, strings and values in a JSON text. For other text the numbers mean nothing.

    containers: objects and lists. strings: includes the keys of objects. values: an upper bound that includes the keys.
    """

    containers: int
    strings: int
    values: int

    def exceeds(self, other: "JsonSize") -> str | None:
        """Return the limit of `other` that this size is above, in words; None when it is within all of them."""
        for name, mine, others in (
            ("strings", self.strings, other.strings),
            ("objects and lists", self.containers, other.containers),
            ("values", self.values, other.values),
        ):
            if mine > others:
                return f"{others} {name}"
        return None


def json_size(text: bytes, max_strings: int) -> JsonSize:
    """Count what a JSON text holds. Every step is one call in C that takes milliseconds for megabytes.

    max_strings: with more strings the other numbers are left at 0, as counting them would take long.
    """
    # A pair of backslashes stands for one; then each that is left escapes the character behind it.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    structure = plain.translate(None, _OTHERS)
    strings = (structure.count(b'"') + 1) // 2
    if strings > max_strings:
        return JsonSize(0, strings, 0)
    # Every second part stands outside of strings.
    outside = b"".join(structure.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    # Each value opens the text, follows a comma or a colon, or is the first in its container.
    return JsonSize(containers, strings, 1 + outside.count(b",") + outside.count(b":") + containers)


def member_beyond(text: bytes, most: JsonSize) -> str | None:
    """Return the key of the outermost object's member in which a text comes to hold more than `most`, if it does.

    Takes about a second for megabytes, and lets other threads go on meanwhile.
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
        if strings > most.strings or containers > most.containers or values >= most.values:
            return key[1:-1].decode(errors="replace") if 2 < len(key) <= MAX_KEY_BYTES else None
    return None


def excess(value: object, max_values: int, max_levels: int) -> str | None:
    """Return what is wrong with JSON, already read, that holds more than it may; None when nothing is."""
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
