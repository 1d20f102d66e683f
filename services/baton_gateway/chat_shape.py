"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

import msgspec

from baton_gateway.choice import Choice, Piece
from baton_gateway.logprobs import chat_logprobs, prompt_logprobs
from baton_gateway.shapes import Envelope
from baton_gateway.tokenizer import ModelTokenizer
from baton_proto import serving_pb2 as pb

encode = msgspec.json.encode


class ChatShape:
    """Writes chat completions, whole or in chunks."""

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

    def opening(self, index: int, prompt: pb.PromptInfo, usage: bytes | None) -> bytes:
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        extra = b',"prompt_token_ids":' + encode(self._prompt_token_ids) if self._token_ids and index == 0 else b""
        return self._envelope.event(choice, usage, extra)

    def chunk(self, index: int, piece: Piece, usage: bytes | None) -> bytes:
        if not piece.text and not piece.logprobs and not (self._token_ids and piece.token_ids):
            return b""
        logprobs = encode(chat_logprobs(piece.logprobs, self._tokenizer)) if self._logprobs else b"null"
        token_ids = b',"token_ids":' + encode(piece.token_ids) if self._token_ids else b""
        choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}' % (
            index,
            encode(piece.text),
            logprobs,
            token_ids,
        )
        return self._envelope.event(choice, usage)

    def closing(self, index: int, choice: Choice, usage: bytes | None) -> bytes:
        event = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            index,
            encode(choice.finish_reason),
            encode(choice.stop_reason),
        )
        return self._envelope.event(event, usage)

    def usage_chunk(self, usage: bytes) -> bytes:
        return self._envelope.event(b"", usage)

    def body(
        self, answers: Sequence[tuple[Choice, Piece]], prompts: Sequence[pb.PromptInfo], usage: dict[str, Any]
    ) -> bytes:
        answer: dict[str, Any] = {
            **self._fields,
            "choices": [self._choice(index, choice, piece) for index, (choice, piece) in enumerate(answers)],
            "usage": usage,
        }
        if self._prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(prompts[0].logprobs, self._tokenizer)
        if self._token_ids:
            answer["prompt_token_ids"] = self._prompt_token_ids
        return encode(answer)

    def _choice(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": chat_logprobs(piece.logprobs, self._tokenizer) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._token_ids:
            fields["token_ids"] = piece.token_ids
        return fields
