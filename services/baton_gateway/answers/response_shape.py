"""Answers of /v1/responses."""

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from baton_proto import serving_pb2 as pb

from ..errors import ApiError
from .choice import Choice, Piece
from .response_output import Ending, Event, LogprobList, Output

# Stands for a list of log probabilities in JSON. It is replaced before the JSON leaves this module.
_LIST = secrets.token_hex(16).encode()


class ResponseShape:
    """Writes a response, whole or as the events of the official API, whose stream has no [DONE]."""

    keeps = True

    def __init__(self, response: dict[str, Any], output: Output) -> None:
        """response: the members that are known before the answer."""
        self._response = {
            **response,
            "status": "in_progress",
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
        }
        self._output = output
        self._events = 0

    def opening(self, index: int, prompt: pb.PromptInfo, usage: bytes | None) -> Iterator[bytes]:
        yield from self._lifecycle("created")
        yield from self._lifecycle("in_progress")
        yield from self._write(self._output.begin())

    def chunk(self, index: int, piece: Piece, usage: bytes | None) -> bytes:
        return b"".join(self._write(self._output.push(piece)))

    def closing(self, index: int, choice: Choice, usage: bytes | None) -> Iterable[bytes]:
        return self._write(self._finish(choice))

    def ending(self, usage: dict[str, Any] | None) -> Iterable[bytes]:
        assert usage is not None
        self._response["usage"] = _usage(usage)
        return self._lifecycle(self._response["status"])

    def failure(self, error: ApiError) -> Iterator[bytes]:
        # A keepalive may have begun the stream, so the opening events may still be missing.
        if not self._events:
            yield from self.opening(0, pb.PromptInfo(), None)
        yield from self._write(self._output.end("incomplete"))
        code = "invalid_prompt" if error.status < 500 else "server_error"
        failed = {"code": code, "message": error.message}
        self._response |= {"status": "failed", "error": failed, "output": self._output.items}
        yield from self._lifecycle("failed")

    def body(
        self, answers: Sequence[tuple[Choice, Piece]], prompts: Sequence[pb.PromptInfo], usage: dict[str, Any]
    ) -> Iterator[bytes]:
        [(choice, _)] = answers
        self._finish(choice)
        self._response["usage"] = _usage(usage)
        yield from _encoded(self._response)

    def _finish(self, choice: Choice) -> Sequence[Event]:
        """End the output and set the status that it gives the response."""
        status: Ending = "incomplete" if choice.finish_reason == "length" else "completed"
        events = self._output.end(status)
        self._response |= {"status": status, "output": self._output.items}
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())
        return events

    def _lifecycle(self, name: str) -> Iterator[bytes]:
        return self._write([{"type": f"response.{name}", "response": self._response}])

    def _write(self, events: Iterable[Event]) -> Iterator[bytes]:
        for event in events:
            yield b"event: %b\ndata: " % event["type"].encode()
            yield from _encoded({**event, "sequence_number": self._events})
            yield b"\n\n"
            self._events += 1


def _encoded(value: dict[str, Any]) -> Iterator[bytes]:
    """Yield JSON in parts, so that lists of log probabilities, which may have 100 MB, are never copied at once."""
    lists: list[LogprobList] = []

    def replaced(found: LogprobList) -> msgspec.Raw:
        lists.append(found)
        return msgspec.Raw(_LIST)

    first, *others = msgspec.json.encode(value, enc_hook=replaced).split(_LIST)
    yield first
    for found, after in zip(lists, others, strict=True):
        yield from found.parts()
        yield after


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        # Tokens written to the prefix cache are not counted per request, but clients require the member.
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
