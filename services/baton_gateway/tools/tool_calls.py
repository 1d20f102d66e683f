"""Tool calls in the form of the API, and the reader for answers that consist of nothing but calls."""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ..bounds import MAX_ARGUMENT_CONTAINERS, MAX_ARGUMENT_STRINGS, MAX_ARGUMENT_VALUES
from ..errors import bad_request
from ..json_size import JsonSize, json_size
from .json_depth import JsonDepth

CallDelta = dict[str, Any]  # an item of `tool_calls` in a delta: the beginning of a call, or a piece of its arguments
Part = str | CallDelta  # a part of an answer; a string is content


class CallReader(Protocol):
    """Reads the text of one choice while it arrives."""

    count: int  # the calls that are complete, or would be if the model ended the text now

    def push(self, text: str) -> list[Part]:
        """Read more text, and return the parts that it adds to the answer."""
        ...

    def end(self) -> list[Part]:
        """End the text, and return the parts that were held back."""
        ...


MakeReader = Callable[[], CallReader]

READ_CHARS = 1024
SMALL_ARGUMENTS_CHARS = 32_768
MOST = JsonSize(MAX_ARGUMENT_CONTAINERS, MAX_ARGUMENT_STRINGS, MAX_ARGUMENT_VALUES)

# The beginning of a call. The grammar of the pods (serving.proto, KIND_TOOL_CALLS) allows exactly this form.
_HEAD = re.compile(r'(?:\[|, )\{"name": "([^"]*)", "arguments": ')


class ToolCalls:
    """Turns the text of one choice into the items of `tool_calls` in the deltas of a stream."""

    def __init__(self, name: str | None) -> None:
        """name: the function whose arguments the whole text is; None = the text is a list of calls."""
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
        return []

    def _begin(self, name: str) -> CallDelta:
        self.count += 1
        return call_begins(self.count - 1, name)

    def _arguments(self, text: str) -> CallDelta:
        return arguments_go_on(self.count - 1, text)


def call_begins(index: int, name: str) -> CallDelta:
    function = {"name": name, "arguments": ""}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def arguments_go_on(index: int, text: str) -> CallDelta:
    return {"index": index, "function": {"arguments": text}}


def read_whole(text: str, reader: CallReader) -> tuple[str, list[dict[str, Any]]]:
    """Return the content and the calls of a complete text, in the form of a message."""
    content: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in _parts(text, reader):
        if isinstance(part, str):
            content.append(part)
        elif "id" in part:
            calls.append({"id": part["id"], "type": "function", "function": part["function"]})
        else:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return "".join(content), calls


def _parts(text: str, reader: CallReader) -> Iterator[Part]:
    # In pieces, because the time of a step grows with the text that the reader has not understood yet.
    for start in range(0, max(len(text), 1), READ_CHARS):
        yield from reader.push(text[start : start + READ_CHARS])
    yield from reader.end()


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, as chat templates expect them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_parsed(call) for call in calls]}


def _check_size(arguments: bytes) -> None:
    if (too_much := json_size(arguments, MOST.strings).exceeds(MOST)) is not None:
        raise bad_request(f"The arguments of a call in the messages have more than {too_much}.", "messages")


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    if len(function["arguments"]) > SMALL_ARGUMENTS_CHARS:
        _check_size(function["arguments"].encode("utf-8", "replace"))
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"] or "{}")}}
    except (ValueError, RecursionError):
        return call
