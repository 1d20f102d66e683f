"""Reads tool calls in the text of a model while the text arrives.

Text is content until a call begins. Text that only looks like a call is content too: it breaks off, is not well formed,
or names no function of the request. The result does not depend on how the text is split into pieces.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ..reading.json_depth import JsonDepth
from ..reading.json_text import read_json, write_json
from ..reading.parts import CallDelta, arguments_go_on, call_begins
from ..reading.text_reader import TextReader
from .call_rules import CallRules

LONGEST_HEAD = 256  # characters before the arguments of a call
NAME = "[a-zA-Z0-9_.-]{1,64}"
SPACE = r"\s{0,32}"  # bounded, since a model may repeat white space forever
# A call up to its arguments as nearly all models write it. The arguments can then be passed on while they arrive.
_HEAD = re.compile(
    rf'\{{{SPACE}"name"{SPACE}:{SPACE}"({NAME})"{SPACE},{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)'
)
# The beginning of a possible call, whose members may come in any order.
_MAYBE_CALL = re.compile(rf'\{{{SPACE}(?:\Z|"(?:[a-z]{{0,10}}\Z|(?:name|arguments|parameters|type|id)"))')

Schema = Mapping[str, Any]  # the JSON schema of a function's arguments
Functions = Mapping[str, Schema | None]  # the functions of a request, by name


class ToolParser(TextReader):
    """Reads the text of one choice in one format, and writes the grammar of calls in this format."""

    # Begin and end calls. The detokenizer must keep them in the text even if they are special tokens.
    markers: ClassVar[tuple[str, ...]]

    def __init__(self, functions: Functions, *, parallel: bool, whole: bool) -> None:
        """parallel: whether calls after the first are read, too.

        whole: a call is passed on only when it is complete, so that a call that breaks off becomes content as a whole.
        """
        super().__init__()
        self.count = 0  # complete calls
        self._functions = functions
        self._parallel = parallel
        self._whole = whole
        self._opening = ""  # the text of a possible call that has been taken so far
        self._depth = JsonDepth()
        self._scanned = 0  # characters of the rest that the depth has counted
        # The next four describe the call that has begun.
        self._index = -1
        self._source: list[str] = []
        self._kept: list[CallDelta] | None = None  # its parts, if they are held back
        self._needs_brace = False  # whether its arguments stand inside an object, whose brace must follow

    @staticmethod
    @abstractmethod
    def writes(template: str) -> bool:
        """Return whether models with this chat template write calls in this format."""

    @staticmethod
    @abstractmethod
    def rules(calls: CallRules) -> str:
        """Return Lark that matches one or more calls and nothing else."""

    @abstractmethod
    def _after_call(self) -> bool:
        """The state after a complete call."""

    @abstractmethod
    def _after_none(self) -> bool:
        """The state after text that turned out to be no call."""

    def _go_object(self) -> bool:
        """Go on to a possible call, which is an object with a name and arguments."""
        self._depth, self._scanned = JsonDepth(), 0
        return self._go(self._object)

    def _object(self) -> bool:
        if head := _HEAD.match(self._rest):
            if head[1] not in self._functions:
                return self._reject(1)
            return self._go_arguments(head[1], head.end(), needs_brace=True)
        if not _MAYBE_CALL.match(self._rest):
            return self._reject(1)
        end = self._depth.advance(self._rest, self._scanned)
        self._scanned = len(self._rest)
        if end is None:
            return self._ended and self._reject(len(self._rest))
        call = read_object(self._rest[:end]) or {}
        arguments = call.get("arguments", call.get("parameters"))
        name = call.get("name")
        if not (isinstance(name, str) and name in self._functions and isinstance(arguments, dict)):
            return self._reject(end)
        self._begin_call(name, end)
        self._put(write_json(arguments))
        return self._end_call(self._after_call)

    def _reject(self, count: int) -> bool:
        """Treat the opening, and `count` more characters, as content."""
        self._add_content(self._opening + self._take(count))
        self._opening = ""
        return self._go(self._after_none)

    def _go_arguments(self, name: str, count: int, needs_brace: bool = False, id: str | None = None) -> bool:
        """Go on to the arguments of a call, which begin after `count` characters of the rest."""
        self._begin_call(name, count, id)
        self._needs_brace = needs_brace
        self._depth = JsonDepth()
        return self._go(self._arguments)

    def _headed(self, pattern: re.Pattern[str]) -> bool:
        """Read a call whose arguments are JSON, and whose head up to them matches a pattern.

        Its group `name`, or else `other`, is the name of the function, and `id`, if there is one, the id of the call.
        """
        brace = self._rest.find("{", 0, LONGEST_HEAD)
        if brace < 0 and not self._ended and len(self._rest) < LONGEST_HEAD:
            return False
        head = pattern.fullmatch(self._rest, 0, brace) if brace >= 0 else None
        groups = {} if head is None else head.groupdict()
        name = groups.get("name") or groups.get("other")
        if name is None or name not in self._functions:
            return self._reject(0)
        return self._go_arguments(name, brace, id=groups.get("id"))

    def _arguments(self) -> bool:
        end = self._depth.advance(self._rest)
        text = self._take(len(self._rest) if end is None else end)
        if text:
            self._source.append(text)
            self._put(text)
        if end is None and not self._ended:
            return False
        if end is None or read_object("".join(self._source[1:])) is None:
            return self._break_call()
        self._depth, self._scanned = JsonDepth(1), 0
        return self._end_call(self._closing if self._needs_brace else self._after_call)

    def _begin_call(self, name: str, count: int, id: str | None = None) -> None:
        self._index += 1
        ignored = self._index > 0 and not self._parallel
        self._kept = [] if self._whole or ignored else None
        self._source = [self._opening + self._take(count)]
        self._opening = ""
        self._put_delta(call_begins(self._index, name, id))

    def _put(self, arguments: str) -> None:
        """Add a piece of the arguments of the call."""
        self._put_delta(arguments_go_on(self._index, arguments))

    def _put_delta(self, delta: CallDelta) -> None:
        if self._kept is None:
            self._parts.append(delta)
        else:
            self._kept.append(delta)

    def _end_call(self, state: Callable[[], bool]) -> bool:
        if self._parallel or self._index == 0:
            self.count += 1
            self._parts += self._kept or ()
        return self._go(state)

    def _break_call(self) -> bool:
        """Give up a call that breaks off. Parts that have already been passed on cannot be taken back."""
        if self._kept is not None:
            self._index -= 1
            self._add_content("".join(self._source))
        return self._go(self._after_none)

    def _closing(self) -> bool:
        """Drop the brace after the arguments, and any other members before it."""
        text = self._rest.lstrip()
        if text.startswith("}"):
            self._drop_space()
            self._drop(1)
        elif text.startswith(","):
            end = self._depth.advance(self._rest, self._scanned)
            self._scanned = len(self._rest)
            if end is None and not self._ended:
                return False
            self._drop(end or 0)
        elif not text and not self._ended:
            return False
        # Models sometimes forget the brace.
        return self._go(self._after_call)


def read_object(text: str) -> dict[str, Any] | None:
    """Parse a text as a JSON object; return None if it is anything else."""
    try:
        value = read_json(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
