"""Finds the end of a JSON object whose text arrives in pieces."""

import re

_NEXT = re.compile(r'["{}\[\]]')
_END_OF_STRING = re.compile(r'["\\]')


class JsonDepth:
    """Counts the objects and lists that are open. For text that is not JSON the count means nothing."""

    def __init__(self, depth: int = 0) -> None:
        """depth: how many objects and lists are open already."""
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def advance(self, text: str, start: int = 0) -> int | None:
        """Read on from `start`. Return the position after the last closing bracket; None if it is missing."""
        position = start
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = (_END_OF_STRING if self._in_string else _NEXT).search(text, position)
            if found is None:
                return None
            position, char = found.end(), found[0]
            if self._in_string:
                self._escaped = char == "\\"
                self._in_string = self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return position
        return None
