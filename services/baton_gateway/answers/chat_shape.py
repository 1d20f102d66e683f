"""Answers of /v1/chat/completions."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from baton_proto import serving_pb2 as pb

from ..errors import ApiError
from ..models.tokenizer import ModelTokenizer
from ..reading.parts import Part, Thought, put_together
from .choice import Choice, Piece
from .logprobs import chat_logprobs, encoded_chat_logprobs, encoded_prompt_logprobs
from .shapes import Envelope, encoded_list

encode = msgspec.json.encode


class ChatShape:
    """Writes chat completions, whole or in chunks."""

    keeps = False

    def __init__(
        self,
        *,
        id: str,
        created: int,
        model: str,
        tokenizer: ModelTokenizer,
        prompt_token_ids: list[int],
        token_ids: bool,
        logprobs: bool,
        prompt_logprobs: bool,
    ) -> None:
        """token_ids, logprobs, prompt_logprobs: whether the client asked for them."""
        self._fields = {"id": id, "object": "chat.completion", "created": created, "model": model}
        self._envelope = Envelope(id, "chat.completion.chunk", created, model)
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def opening(self, index: int, prompt: pb.PromptInfo, usage: bytes | None) -> Sequence[bytes]:
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        extra = b',"prompt_token_ids":' + encode(self._prompt_token_ids) if self._token_ids and index == 0 else b""
        return (self._envelope.event(choice, usage, extra),)

    def chunk(self, index: int, piece: Piece, usage: bytes | None) -> bytes:
        parts = piece.parts
        if not (piece.text or parts or piece.logprobs or (self._token_ids and piece.token_ids)):
            return b""
        logprobs = b"null"
        if self._logprobs:
            logprobs = encode({"content": list(chat_logprobs(piece.logprobs, self._tokenizer)), "refusal": None})
        token_ids = b',"token_ids":' + encode(piece.token_ids) if self._token_ids else b""
        if parts is None:
            return self._delta(index, b'{"content":%b}' % encode(piece.text), usage, logprobs, token_ids)
        if len(parts) == 1:
            part = parts[0]
            delta = b'{"content":%b}' % encode(part) if part.__class__ is str else _encode_part(part)
            return self._delta(index, delta, usage, logprobs, token_ids)
        # Each part gets its own event: clients merge parts with the same index across events, but not within one.
        deltas = [_encode_part(part) for part in parts]
        if not deltas and not piece.logprobs and not token_ids:
            return b""
        *first, last = deltas or [b"{}"]
        events = [self._delta(index, delta, usage) for delta in first]
        return b"".join([*events, self._delta(index, last, usage, logprobs, token_ids)])

    def _delta(
        self, index: int, delta: bytes, usage: bytes | None, logprobs: bytes = b"null", token_ids: bytes = b""
    ) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}' % (index, delta, logprobs, token_ids)
        return self._envelope.event(choice, usage)

    def closing(self, index: int, choice: Choice, usage: bytes | None) -> Iterable[bytes]:
        event = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            index,
            encode(_finish_reason(choice)),
            encode(choice.stop_reason),
        )
        return (self._envelope.event(event, usage),)

    def ending(self, usage: dict[str, Any] | None) -> Iterable[bytes]:
        return (self._envelope.ending(usage),)

    def failure(self, error: ApiError) -> Iterable[bytes]:
        return (self._envelope.failure(error),)

    def body(
        self, answers: Sequence[tuple[Choice, Piece]], prompts: Sequence[pb.PromptInfo], usage: dict[str, Any]
    ) -> Iterator[bytes]:
        before = encode(self._fields)[:-1] + b',"choices":['
        for index, (choice, piece) in enumerate(answers):
            yield before
            yield from self._choice(index, choice, piece)
            before = b","
        yield b'],"usage":' + encode(usage)
        if self._prompt_logprobs:
            yield b',"prompt_logprobs":'
            yield from encoded_prompt_logprobs(prompts[0].logprobs, self._tokenizer)
        if self._token_ids:
            yield b',"prompt_token_ids":'
            yield from encoded_list(self._prompt_token_ids)
        yield b"}"

    def _choice(self, index: int, choice: Choice, piece: Piece) -> Iterator[bytes]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.parts is not None:
            whole = put_together(piece.parts)
            message["content"] = whole.content or (None if whole.calls else "")
            if whole.thoughts:
                message |= {"reasoning_content": whole.thoughts, "reasoning": whole.thoughts}
            if whole.calls:
                message["tool_calls"] = whole.calls
        yield b'{"index":%d,"message":%b,"logprobs":' % (index, encode(message))
        if self._logprobs:
            yield from encoded_chat_logprobs(piece.logprobs, self._tokenizer)
        else:
            yield b"null"
        yield b',"finish_reason":%b,"stop_reason":%b' % (
            encode(_finish_reason(choice)),
            encode(choice.stop_reason),
        )
        if self._token_ids:
            yield b',"token_ids":'
            yield from encoded_list(piece.token_ids)
        yield b"}"


def _encode_part(part: Part) -> bytes:
    """Return the JSON of the delta for a part."""
    if isinstance(part, Thought):
        # Clients read thoughts from one of two fields: `reasoning` is the newer one.
        text = encode(part.text)
        return b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
    return (b'{"content":%b}' if isinstance(part, str) else b'{"tool_calls":[%b]}') % encode(part)


def _finish_reason(choice: Choice) -> str | None:
    return "tool_calls" if choice.calls and choice.finish_reason == "stop" else choice.finish_reason
