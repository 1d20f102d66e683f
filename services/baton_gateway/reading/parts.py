"""The parts of an answer: content, thoughts, and tool calls."""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


class Thought(msgspec.Struct, frozen=True):
    """A piece of the model's thoughts."""

    text: str


CallDelta = dict[str, Any]  # an item of `tool_calls` in a delta: the beginning of a call, or a piece of its arguments
Part = str | Thought | CallDelta  # a string is content


class PartReader(Protocol):
    """Reads the text of one choice while it arrives."""

    def push(self, text: str) -> list[Part]:
        """Read more text, and return the parts that it adds to the answer."""
        ...

    def end(self) -> list[Part]:
        """End the text, and return the parts that were held back."""
        ...


class CallReader(PartReader, Protocol):
    """Reads text that may contain tool calls."""

    count: int  # complete calls, including one that would be complete if the text ended now


class ThinkingReader(PartReader, Protocol):
    """Reads text that may contain thoughts."""

    thinking: bool  # whether the text read so far ends within thoughts

    def plain(self, text: str) -> Part | None:
        """Read text that is wholly a thought or wholly content, as most text is. None = `push` must read it."""
        ...


class AnswerReader:
    """Reads the thoughts in a text first, and then the tool calls in the remaining text."""

    def __init__(self, thoughts: ThinkingReader | None, calls: CallReader | None) -> None:
        """None = there are none, and text that looks like them is content."""
        self._thoughts = thoughts
        self._calls = calls
        self.may_think = thoughts is not None
        self.thinking = thoughts is not None and thoughts.thinking  # whether the text so far ends within thoughts

    @property
    def calls(self) -> int:
        """The number of complete calls."""
        return 0 if self._calls is None else self._calls.count

    def push(self, text: str) -> list[Part]:
        thoughts, calls = self._thoughts, self._calls
        if thoughts is None:
            return [text] if calls is None else calls.push(text)
        # Streams consist of short texts, nearly all of which are plain. This is their fast path.
        if (part := thoughts.plain(text)) is not None:
            return calls.push(text) if calls is not None and part is text else [part]
        parts = thoughts.push(text)
        self.thinking = thoughts.thinking
        return parts if calls is None else self._read_calls(parts)

    def end(self) -> list[Part]:
        parts = self._read_calls([] if self._thoughts is None else self._thoughts.end())
        return parts if self._calls is None else [*parts, *self._calls.end()]

    def _read_calls(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        read: list[Part] = []
        for part in parts:
            if isinstance(part, str):
                read += self._calls.push(part)
            else:
                read.append(part)
        return read


MakeReader = Callable[[], AnswerReader]


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """All parts of an answer. calls: in the form of a message."""

    content: str
    thoughts: str
    calls: list[dict[str, Any]]


def joined(parts: list[Part], more: list[Part]) -> list[Part]:
    """Join two lists of parts. Content or thoughts on both sides of the seam become one part."""
    if not parts or not more:
        return parts or more
    match parts[-1], more[0]:
        case str(last), str(first):
            seam: Part = last + first
        case Thought(last), Thought(first):
            seam = Thought(last + first)
        case _:
            return parts + more
    return [*parts[:-1], seam, *more[1:]]


def put_together(parts: Iterable[Part]) -> WholeAnswer:
    """Join the parts of an answer."""
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for part in parts:
        if isinstance(part, str):
            content.append(part)
        elif isinstance(part, Thought):
            thoughts.append(part.text)
        elif "id" in part:
            calls.append({"id": part["id"], "type": "function", "function": part["function"]})
            arguments.append([])
        else:
            arguments[-1].append(part["function"]["arguments"])
    for call, pieces in zip(calls, arguments, strict=True):
        call["function"] = call["function"] | {"arguments": "".join(pieces)}
    return WholeAnswer("".join(content), "".join(thoughts), calls)


def call_begins(index: int, name: str, id: str | None = None) -> CallDelta:
    """Return the beginning of a call. id: the one that the model gave it, if it gave one."""
    function = {"name": name, "arguments": ""}
    return {"index": index, "id": id or f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def arguments_go_on(index: int, text: str) -> CallDelta:
    return {"index": index, "function": {"arguments": text}}
