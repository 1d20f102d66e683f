"""The output of a response: its items, and the events that tell how they come about."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from baton_gateway.choice import Piece
from baton_gateway.logprobs import chat_logprobs
from baton_gateway.tokenizer import ModelTokenizer
from baton_gateway.tool_calls import ToolCalls

Event = dict[str, Any]
Ending = Literal["completed", "incomplete"]


class Output(Protocol):
    """Events lack their sequence numbers, and those of `push` must be written before the next call changes them."""

    items: list[dict[str, Any]]

    def begin(self) -> Sequence[Event]:
        """Return what precedes the first tokens."""
        ...

    def push(self, piece: Piece) -> Sequence[Event]:
        """Return what some tokens add."""
        ...

    def end(self, status: Ending) -> Sequence[Event]:
        """Return what finishes the last item, which has this status."""
        ...


class MessageOutput:
    """A message of one part, which is text."""

    def __init__(self, id: str, tokenizer: ModelTokenizer, logprobs: bool) -> None:
        """logprobs: whether the client asked for them."""
        item = {"id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self._item: dict[str, Any] = item
        self.items = [self._item]
        self._part = {"item_id": id, "output_index": 0, "content_index": 0}
        self._tokenizer = tokenizer
        self._with_logprobs = logprobs
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> Sequence[Event]:
        return (
            {"type": "response.output_item.added", "output_index": 0, "item": self._item},
            {"type": "response.content_part.added", **self._part, "part": _text_part("", [])},
        )

    def push(self, piece: Piece) -> Sequence[Event]:
        logprobs = chat_logprobs(piece.logprobs, self._tokenizer)["content"] if self._with_logprobs else []
        if not piece.text and not logprobs:
            return ()
        self._texts.append(piece.text)
        self._logprobs += logprobs
        return ({"type": "response.output_text.delta", **self._part, "delta": piece.text, "logprobs": logprobs},)

    def end(self, status: Ending) -> Sequence[Event]:
        text = "".join(self._texts)
        part = _text_part(text, self._logprobs)
        self._item |= {"status": status, "content": [part]}
        return (
            {"type": "response.output_text.done", **self._part, "text": text, "logprobs": self._logprobs},
            {"type": "response.content_part.done", **self._part, "part": part},
            {"type": "response.output_item.done", "output_index": 0, "item": self._item},
        )


class CallsOutput:
    """Calls of functions, an item each."""

    def __init__(self, name: str | None) -> None:
        """name: of the function whose arguments are all of the text; None = the text is a list of calls."""
        self.items: list[dict[str, Any]] = []
        self._calls = ToolCalls(name)
        self._arguments: list[str] = []  # of the last call

    def begin(self) -> Sequence[Event]:
        return ()

    def push(self, piece: Piece) -> Sequence[Event]:
        events: list[Event] = []
        for delta in self._calls.push(piece.text):
            arguments = delta["function"]["arguments"]
            if "id" in delta:
                events += self.end("completed")
                events.append(self._begin_call(delta["id"], delta["function"]["name"]))
            elif arguments:
                self._arguments.append(arguments)
                events.append({"type": "response.function_call_arguments.delta", **self._place(), "delta": arguments})
        return events

    def end(self, status: Ending) -> Sequence[Event]:
        if not self.items:
            return ()
        item, arguments = self.items[-1], "".join(self._arguments)
        item |= {"status": status, "arguments": arguments}
        done = {"type": "response.function_call_arguments.done", **self._place(), "name": item["name"]}
        return (
            {**done, "arguments": arguments},
            {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item},
        )

    def _begin_call(self, call_id: str, name: str) -> Event:
        item = {"id": f"fc_{call_id.removeprefix('call_')}", "type": "function_call", "status": "in_progress"}
        item |= {"call_id": call_id, "name": name, "arguments": ""}
        self.items.append(item)
        self._arguments = []
        # A copy, since one push may hold all of a call.
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
