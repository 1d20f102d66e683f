"""Where an object of JSON ends whose text arrives in pieces."""

import re

_NEXT = re.compile(r'["{}\[\]]')
_END_OF_STRING = re.compile(r'["\\]')


class JsonDepth:
    """Follows how many objects and lists are open. Text that is no JSON has some depth, too."""

    def __init__(self, depth: int = 0) -> None:
        """depth: what is open already."""
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def advance(self, text: str, start: int = 0) -> int | None:
        """Read on from `start`; return the position behind the last one that closes, None if the text ends before."""
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
