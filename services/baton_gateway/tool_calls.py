"""The calls of functions in an answer that consists of them, read while it comes."""

import json
import re
import secrets
from typing import Any

# As the pods write a call (serving.proto, KIND_TOOL_CALLS): they follow this to the letter.
_HEAD = re.compile(r'(?:\[|, )\{"name": "([^"]*)", "arguments": ')


class ToolCalls:
    """Turns the text of one choice into the members of `tool_calls` in a stream's deltas."""

    def __init__(self, name: str | None) -> None:
        """name: of the function whose arguments are all of the text; None = the text is a list of calls."""
        self._named = name
        self._count = 0
        self._rest = ""  # of the text between two calls
        self._depth = 0  # of the arguments that have begun
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> list[dict[str, Any]]:
        """Return what some text adds: the beginnings of calls, and parts of their arguments, each with its index."""
        if self._named is not None:
            begun = [] if self._count else [self._begin(self._named)]
            return begun + ([self._arguments(text)] if text else [])
        deltas: list[dict[str, Any]] = []
        while text:
            if not self._depth:
                self._rest += text
                head = _HEAD.search(self._rest)
                # The brace that opens the arguments comes with the text that follows the head.
                if head is None or head.end() == len(self._rest):
                    break
                deltas.append(self._begin(head[1]))
                text, self._rest = self._rest[head.end() :], ""
            end = self._end_of_arguments(text)
            deltas.append(self._arguments(text[:end]))
            text = text[end:]
        return deltas

    def _begin(self, name: str) -> dict[str, Any]:
        self._count += 1
        function = {"name": name, "arguments": ""}
        id = f"call_{secrets.token_hex(12)}"
        return {"index": self._count - 1, "id": id, "type": "function", "function": function}

    def _arguments(self, text: str) -> dict[str, Any]:
        return {"index": self._count - 1, "function": {"arguments": text}}

    def _end_of_arguments(self, text: str) -> int:
        """Return how much of the text belongs to the arguments, an object of JSON."""
        for position, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return position + 1
        return len(text)


def all_calls(text: str, name: str | None) -> list[dict[str, Any]]:
    """Return the calls of a whole text, as `tool_calls` of a message has them."""
    calls: list[dict[str, Any]] = []
    for delta in ToolCalls(name).push(text):
        if "id" in delta:
            calls.append({"id": delta["id"], "type": "function", "function": delta["function"]})
        else:
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, which is how chat templates take them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return call | {"function": function | {"arguments": json.loads(function["arguments"] or "{}")}}
    except (ValueError, RecursionError):
        return call
