"""Tool calls in the form of the API, and the reader for answers that consist of nothing but calls."""

import re
from collections.abc import Mapping
from typing import Any

from ..bounds import MAX_ARGUMENT_CONTAINERS, MAX_ARGUMENT_STRINGS, MAX_ARGUMENT_VALUES
from ..errors import bad_request
from ..json_size import JsonSize, json_size
from ..reading.json_depth import JsonDepth
from ..reading.json_text import read_json
from ..reading.parts import CallDelta, Part, arguments_go_on, call_begins

SMALL_ARGUMENTS_CHARS = 32_768
MOST = JsonSize(MAX_ARGUMENT_CONTAINERS, MAX_ARGUMENT_STRINGS, MAX_ARGUMENT_VALUES)

# The beginning of a call. The grammar of the pods (serving.proto, KIND_TOOL_CALLS) allows exactly this form.
_HEAD = re.compile(r'(?:\[|, )\{"name": "([^"]*)", "arguments": ')


class ToolCalls:
    """Turns the text of one choice into the items of `tool_calls` in the deltas of a stream."""

    def __init__(self, name: str | None) -> None:
        """name: the function whose arguments make up the whole text; None = the text is a list of calls."""
        self.count = 0
        self._named = name
        self._rest = ""  # the text between two calls that has been read so far
        self._depth: JsonDepth | None = None  # position in the arguments that have begun

    def push(self, text: str) -> list[Part]:
        """Read more text. Return the beginnings of calls and the pieces of their arguments, each with its index."""
        if self._named is not None:
            begun = [] if self.count else [self._begin(self._named)]
            return [*begun, *([self._arguments(text)] if text else [])]
        deltas: list[Part] = []
        while text:
            if self._depth is None:
                self._rest += text
                head = _HEAD.search(self._rest)
                # The brace that opens the arguments comes with the text that follows the head.
                if head is None or head.end() == len(self._rest):
                    break
                deltas.append(self._begin(head[1]))
                text, self._rest = self._rest[head.end() :], ""
                self._depth = JsonDepth()
            end = self._depth.advance(text)
            deltas.append(self._arguments(text[:end]))
            if end is None:
                break
            text, self._depth = text[end:], None
        return deltas

    def end(self) -> list[Part]:
        # An empty text is a call without arguments.
        return [self._begin(self._named)] if self._named is not None and not self.count else []

    def _begin(self, name: str) -> CallDelta:
        self.count += 1
        return call_begins(self.count - 1, name)

    def _arguments(self, text: str) -> CallDelta:
        return arguments_go_on(self.count - 1, text)


class CallArguments(dict[str, Any]):
    """The arguments of a call in a message, for chat templates.

    Most templates take an object and write it as JSON. Some, for example DeepSeek's, append the arguments to a text.
    """

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        """text: the arguments as JSON."""
        super().__init__(arguments)
        self._text = text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, as chat templates expect them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_parsed(call) for call in calls]}


def _check_size(arguments: bytes) -> None:
    if (too_much := json_size(arguments, MOST.strings).exceeds(MOST)) is not None:
        raise bad_request(f"The arguments of a tool call in the messages have more than {too_much}.", "messages")


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    if len(function["arguments"]) > SMALL_ARGUMENTS_CHARS:
        _check_size(function["arguments"].encode("utf-8", "replace"))
    text = function["arguments"] or "{}"
    try:
        arguments = read_json(text)
    except (ValueError, RecursionError):
        return call
    if isinstance(arguments, dict):
        arguments = CallArguments(arguments, text)
    return call | {"function": function | {"arguments": arguments}}
