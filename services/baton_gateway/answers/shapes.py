"""The parts of writing an answer that the generation endpoints share."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from baton_proto import serving_pb2 as pb

from ..errors import ApiError
from .choice import Choice, Piece

RUN = 1024  # numbers or tokens that are written as JSON in less than a millisecond
LOGPROBS_RUN = 16  # the same for tokens with their alternatives

DONE = b"data: [DONE]\n\n"


# Unicode and stream readers such as httpx's treat U+0085, U+2028 and U+2029 as line ends. Server-sent events do not.
_LINE_ENDS = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))


def one_line_each(events: bytes) -> bytes:
    """Escape the characters in the JSON of events that some readers treat as line ends."""
    for character, escape in _LINE_ENDS:
        events = events.replace(character, escape)
    return events


def encoded_list(values: Iterable[Any], run: int = RUN) -> Iterator[bytes]:
    """Yield a list as JSON in parts of `run` values, so that each part takes less than a millisecond."""
    rest, before = iter(values), b"["
    while part := list(itertools.islice(rest, run)):
        yield before + msgspec.json.encode(part)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"


@dataclass(slots=True)
class Usage:
    """Tokens of a request. cached_tokens: prompt tokens no pod had to compute.

    reasoning_tokens: completion tokens that are thoughts; None = the answer could have none.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None

    def as_dict(self) -> dict[str, Any]:
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class Shape(Protocol):
    """Writes an answer as one endpoint's JSON.

    A streamed answer is made of server-sent events. `usage` is the JSON of a chunk's `usage`; None = no such member.
    keeps: the shape keeps what `chunk` is given, since the end of the answer repeats it.
    """

    keeps: bool

    def opening(self, index: int, prompt: pb.PromptInfo, usage: bytes | None) -> Iterable[bytes]:
        """Return the events before the first tokens of a choice, if any, in parts that take little time each."""
        ...

    def chunk(self, index: int, piece: Piece, usage: bytes | None) -> bytes:
        """Return the event for some tokens of a choice, nothing when there is nothing to show."""
        ...

    def closing(self, index: int, choice: Choice, usage: bytes | None) -> Iterable[bytes]:
        """Return the events that end a choice, in parts that take little time each."""
        ...

    def ending(self, usage: dict[str, Any] | None) -> Iterable[bytes]:
        """Return the end of a stream in parts. usage: of the whole answer; None = the client did not ask for it."""
        ...

    def failure(self, error: ApiError) -> Iterable[bytes]:
        """Return the end of a stream that has failed, in parts."""
        ...

    def body(
        self, answers: Sequence[tuple[Choice, Piece]], prompts: Sequence[pb.PromptInfo], usage: dict[str, Any]
    ) -> Iterable[bytes]:
        """Return the whole answer, in parts that take little time each."""
        ...


class Envelope:
    """The events of a chat or a completion: the members that all chunks share are written once."""

    def __init__(self, id: str, object: str, created: int, model: str) -> None:
        fields = {"id": id, "object": object, "created": created, "model": model}
        self._start = b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['

    def event(self, choice: bytes, usage: bytes | None, extra: bytes = b"") -> bytes:
        """Return an event with one choice, or with none for b"". extra: more members, each after a comma."""
        if usage is None:
            return b"%b%b]%b}\n\n" % (self._start, choice, extra)
        return b'%b%b]%b,"usage":%b}\n\n' % (self._start, choice, extra, usage)

    def around(self, usage: bytes | None) -> tuple[bytes, bytes]:
        """Return the bytes before and after the choice of an event."""
        return self._start, b"]}\n\n" if usage is None else b'],"usage":%b}\n\n' % usage

    def ending(self, usage: dict[str, Any] | None) -> bytes:
        return DONE if usage is None else self.event(b"", msgspec.json.encode(usage)) + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"
