"""The answer to one request, as the client measured it."""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Outcome = Literal["pending", "completed", "cancelled", "failed"]


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    @property
    def said(self) -> str:
        return self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)) or ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Answer:
    """Times in seconds since the load began.

    due: when the request was to be sent. sent: when it was. end: when the answer ended. asked: how many tokens it asked
    for. session: 0 = not part of a conversation. turn: its number there. events: when tokens came, and how many.
    inputs: tokens of the prompt, exact when they were sent as token ids. tokens, prompt_tokens, cached_tokens: as the
    server says.
    """

    due: float
    inputs: int
    asked: int
    session: int = 0
    turn: int = 0
    sent: float = 0.0
    end: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    outcome: Outcome = "pending"
    error: str = ""  # the kind of error, by which errors are counted
    detail: str = ""

    @property
    def ttft(self) -> float | None:
        """TTFT counts from the scheduled send time, so a client that sends late does not shorten it."""
        return self.events[0][0] - self.due if self.events else None

    @property
    def e2e(self) -> float | None:
        return self.end - self.due if self.outcome == "completed" else None

    @property
    def tpot(self) -> float | None:
        """The mean time of a token after the first ones."""
        later = self.tokens - self.events[0][1] if self.events else 0
        return (self.events[-1][0] - self.events[0][0]) / later if later > 0 else None

    @property
    def gaps(self) -> list[float]:
        """The ITL of every token after the first chunk; tokens of one chunk share the time since the previous chunk."""
        return [
            (now - before) / count
            for (before, _), (now, count) in zip(self.events, self.events[1:], strict=False)
            for _ in range(count)
        ]

    def fail(self, error: str, detail: str = "") -> None:
        self.outcome, self.error, self.detail = "failed", error, detail


class AnswerReader:
    """Reads an answer's server-sent events as they come.

    said, token_ids: what it consists of. by_token: the server counts tokens in each chunk; unless that is known before,
    the first chunk with text and a count tells. done: it came to its end.
    """

    def __init__(self, answer: Answer, began: float, by_token: bool = False) -> None:
        self._answer = answer
        self._began = began
        self._rest = b""
        self.said: list[str] = []
        self.token_ids: list[int] = []
        self.by_token = by_token
        self.done = False

    def feed(self, data: bytes, now: float) -> None:
        """now: on the clock on which the load began."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:].strip(), now - self._began)

    def _read(self, data: bytes, at: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            self._answer.fail("unreadable event", f"{error}: {data[:300]!r}")
            return
        if event.error is not None:
            self._answer.fail("error in the stream", str(event.error)[:300])
            return
        count = 0
        for choice in event.choices:
            self.said.append(choice.said)
            self.token_ids += choice.token_ids or ()
            count += bool(choice.said)
        if event.usage is None:
            self._answer.tokens += count
        else:
            count = self._use(event.usage, count, last=not event.choices)
        if count > 0:
            self._answer.events.append((at, count))

    def _use(self, usage: _Usage, count: int, last: bool) -> int:
        """Return how many tokens a chunk has. last: it is the one without tokens that sums up."""
        answer = self._answer
        # A server that sends usage with a chunk of text counts the tokens of each chunk. Usage in a chunk without text
        # may be that of the whole answer.
        self.by_token = self.by_token or count > 0
        if self.by_token:
            count = 0 if last else usage.completion_tokens - answer.tokens
        answer.tokens = usage.completion_tokens
        answer.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            answer.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        return count
