"""The output of a response: its items, and the stream events that report them."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from ..models.tokenizer import ModelTokenizer
from ..reading.parts import CallDelta, Part, Thought
from .choice import Piece
from .logprobs import chat_logprobs

Event = dict[str, Any]
Ending = Literal["completed", "incomplete"]


class LogprobList:
    """The log probabilities of a message as JSON. The events that repeat them share the bytes, which may be many."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def add(self, entries: Sequence[msgspec.Raw]) -> None:
        if entries:
            self._chunks += (b"," if self._chunks else b"[", b",".join(entries))

    def parts(self) -> Iterator[bytes]:
        yield from self._chunks
        yield b"]" if self._chunks else b"[]"


class Output(Protocol):
    """Builds items and events. Events have no sequence numbers yet. A later call may change the events of `push`."""

    items: list[dict[str, Any]]

    def begin(self) -> Sequence[Event]:
        """Return the events before the first tokens."""
        ...

    def push(self, piece: Piece) -> Sequence[Event]:
        """Return the events for some tokens. They must be written before the next call."""
        ...

    def end(self, status: Ending) -> Sequence[Event]:
        """Return the events that end the last item with this status."""
        ...


class MessageOutput:
    """A message with one text part."""

    def __init__(self, id: str, tokenizer: ModelTokenizer, logprobs: bool, index: int = 0) -> None:
        """logprobs: whether the client asked for them. index: of the item in the output."""
        item = {"id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self._item: dict[str, Any] = item
        self.items = [self._item]
        self._index = index
        self._part = {"item_id": id, "output_index": index, "content_index": 0}
        self._tokenizer = tokenizer
        self._with_logprobs = logprobs
        self._texts: list[str] = []
        self._logprobs = LogprobList()

    def begin(self) -> Sequence[Event]:
        return (
            # A copy, because one push may complete this message before the event is written.
            {"type": "response.output_item.added", "output_index": self._index, "item": dict(self._item)},
            {"type": "response.content_part.added", **self._part, "part": _text_part("", [])},
        )

    def push(self, piece: Piece) -> Sequence[Event]:
        return self.add(piece.text, _entries(piece, self._tokenizer) if self._with_logprobs else [])

    def add(self, text: str, logprobs: list[msgspec.Raw]) -> Sequence[Event]:
        if not text and not logprobs:
            return ()
        self._texts.append(text)
        self._logprobs.add(logprobs)
        return ({"type": "response.output_text.delta", **self._part, "delta": text, "logprobs": logprobs},)

    def end(self, status: Ending) -> Sequence[Event]:
        text = "".join(self._texts)
        part = _text_part(text, self._logprobs)
        self._item |= {"status": status, "content": [part]}
        return (
            {"type": "response.output_text.done", **self._part, "text": text, "logprobs": self._logprobs},
            {"type": "response.content_part.done", **self._part, "part": part},
            {"type": "response.output_item.done", "output_index": self._index, "item": self._item},
        )


class ReasoningOutput:
    """The thoughts of the model, as one text part."""

    def __init__(self, id: str, index: int) -> None:
        """index: of the item in the output."""
        self.item: dict[str, Any] = {"id": id, "type": "reasoning", "status": "in_progress", "summary": []}
        self._index = index
        self._part = {"item_id": id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []

    def begin(self) -> Sequence[Event]:
        return (
            {"type": "response.output_item.added", "output_index": self._index, "item": self.item | {"content": []}},
            {"type": "response.content_part.added", **self._part, "part": {"type": "reasoning_text", "text": ""}},
        )

    def push(self, text: str) -> Event:
        self._texts.append(text)
        return {"type": "response.reasoning_text.delta", **self._part, "delta": text}

    def end(self, status: Ending) -> Sequence[Event]:
        text = "".join(self._texts)
        part = {"type": "reasoning_text", "text": text}
        self.item |= {"status": status, "content": [part]}
        return (
            {"type": "response.reasoning_text.done", **self._part, "text": text},
            {"type": "response.content_part.done", **self._part, "part": part},
            {"type": "response.output_item.done", "output_index": self._index, "item": self.item},
        )


class CallOutput:
    """A function call."""

    def __init__(self, call_id: str, name: str, index: int) -> None:
        """index: of the item in the output."""
        id = f"fc_{call_id.removeprefix('call_')}"
        self.item: dict[str, Any] = {"id": id, "type": "function_call", "status": "in_progress"}
        self.item |= {"call_id": call_id, "name": name, "arguments": ""}
        self._index = index
        self._place = {"item_id": id, "output_index": index}
        self._arguments: list[str] = []

    def begin(self) -> Event:
        # A copy, because one push may complete this call before the event is written.
        return {"type": "response.output_item.added", "output_index": self._index, "item": dict(self.item)}

    def push(self, arguments: str) -> Event:
        self._arguments.append(arguments)
        return {"type": "response.function_call_arguments.delta", **self._place, "delta": arguments}

    def end(self, status: Ending) -> Sequence[Event]:
        arguments = "".join(self._arguments)
        self.item |= {"status": status, "arguments": arguments}
        done = {"type": "response.function_call_arguments.done", **self._place, "name": self.item["name"]}
        return (
            {**done, "arguments": arguments},
            {"type": "response.output_item.done", "output_index": self._index, "item": self.item},
        )


class PartsOutput:
    """An item for each run of parts of one kind: thoughts, function calls, and messages for the other text."""

    def __init__(self, id: str, tokenizer: ModelTokenizer, logprobs: bool) -> None:
        """id, tokenizer, logprobs: as for a message."""
        self.items: list[dict[str, Any]] = []
        self._id = id
        self._tokenizer = tokenizer
        self._with_logprobs = logprobs
        self._open: MessageOutput | CallOutput | ReasoningOutput | None = None
        self._logprobs: list[msgspec.Raw] = []  # of text that may still belong to a message

    def begin(self) -> Sequence[Event]:
        return ()

    def push(self, piece: Piece) -> Sequence[Event]:
        if self._with_logprobs:
            self._logprobs += _entries(piece, self._tokenizer)[piece.thought_tokens :]
        events: list[Event] = []
        for part in piece.parts or ():
            events += self._add(part)
        return events

    def end(self, status: Ending) -> Sequence[Event]:
        return self._close(status)

    def _add(self, part: Part) -> list[Event]:
        if isinstance(part, str):
            return self._add_text(part)
        if isinstance(part, Thought):
            return self._add_thought(part.text)
        if "id" in part:
            return self._begin_call(part)
        if isinstance(self._open, CallOutput) and part["function"]["arguments"]:
            return [self._open.push(part["function"]["arguments"])]
        return []

    def _add_text(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, MessageOutput):
            events += self._close("completed")
            self._open = MessageOutput(self._id + self._number, self._tokenizer, self._with_logprobs, len(self.items))
            self.items += self._open.items
            events += self._open.begin()
        logprobs, self._logprobs = self._logprobs, []
        return [*events, *self._open.add(text, logprobs)]

    def _add_thought(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, ReasoningOutput):
            events += self._close("completed")
            self._open = ReasoningOutput(f"rs_{self._id.removeprefix('msg_')}{self._number}", len(self.items))
            self.items.append(self._open.item)
            events += self._open.begin()
        self._logprobs = []
        return [*events, self._open.push(text)]

    def _begin_call(self, delta: CallDelta) -> list[Event]:
        events = self._close("completed")
        self._open = CallOutput(delta["id"], delta["function"]["name"], len(self.items))
        self.items.append(self._open.item)
        self._logprobs = []
        return [*events, self._open.begin()]

    @property
    def _number(self) -> str:
        """A suffix that makes the id of the next item unique."""
        return f"_{len(self.items)}" if self.items else ""

    def _close(self, status: Ending) -> list[Event]:
        return [] if self._open is None else [*self._open.end(status)]


def _entries(piece: Piece, tokenizer: ModelTokenizer) -> list[msgspec.Raw]:
    """Return the log probabilities of some tokens as JSON."""
    return [msgspec.Raw(msgspec.json.encode(entry)) for entry in chat_logprobs(piece.logprobs, tokenizer)]


def _text_part(text: str, logprobs: LogprobList | list[msgspec.Raw]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
