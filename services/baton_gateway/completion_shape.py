"""Answers of /v1/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton_gateway.choice import Choice, Piece
from baton_gateway.errors import ApiError
from baton_gateway.logprobs import completion_logprobs, prompt_logprobs
from baton_gateway.shapes import Envelope
from baton_gateway.tokenizer import ModelTokenizer
from baton_proto import serving_pb2 as pb

encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that may come back: its tokens and, where it is echoed, its text."""

    token_ids: list[int]
    text: str = ""


class CompletionShape:
    """Writes text completions, whole or in chunks."""

    def __init__(
        self,
        *,
        id: str,
        created: int,
        model: str,
        tokenizer: ModelTokenizer,
        prompts: Sequence[EchoedPrompt],
        n: int,
        kept: int,
        skip_special_tokens: bool,
        echo: bool,
        token_ids: bool,
        logprobs: bool,
        prompt_logprobs: bool,
    ) -> None:
        """n: choices of each prompt; kept: how many of them are answered, those with the likeliest tokens.

        token_ids, logprobs, prompt_logprobs: whether the client asked for them.
        """
        self._fields = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._envelope = Envelope(id, "text_completion", created, model)
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._n = n
        self._kept = kept
        self._skip_special_tokens = skip_special_tokens
        self._echo = echo
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs

    def opening(self, index: int, prompt: pb.PromptInfo, usage: bytes | None) -> bytes:
        if not self._echo and not self._token_ids:
            return b""
        echoed = self._echoed(index, prompt)
        extra = b',"prompt_token_ids":' + encode(self._prompt(index).token_ids) if self._token_ids else b""
        return self._event(index, echoed, first_is_empty=True, extra=extra, usage=usage)

    def chunk(self, index: int, piece: Piece, usage: bytes | None) -> bytes:
        if not piece.text and not piece.logprobs and not (self._token_ids and piece.token_ids):
            return b""
        if self._echo and piece.offsets:
            base = len(self._prompt(index).text)
            piece.offsets = [base + offset for offset in piece.offsets]
        return self._event(index, piece, first_is_empty=False, extra=b"", usage=usage)

    def closing(self, index: int, choice: Choice, usage: bytes | None) -> bytes:
        event = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            index,
            encode(choice.finish_reason),
            encode(choice.stop_reason),
        )
        return self._envelope.event(event, usage)

    def ending(self, usage: dict[str, Any] | None) -> bytes:
        return self._envelope.ending(usage)

    def failure(self, error: ApiError) -> bytes:
        return self._envelope.failure(error)

    def body(
        self, answers: Sequence[tuple[Choice, Piece]], prompts: Sequence[pb.PromptInfo], usage: dict[str, Any]
    ) -> bytes:
        choices: list[dict[str, Any]] = []
        for number, prompt in enumerate(prompts):
            group = answers[number * self._n : (number + 1) * self._n]
            if self._kept < self._n:
                group = sorted(group, key=_mean_logprob, reverse=True)[: self._kept]
            for choice, piece in group:
                fields = self._choice(number * self._n, choice, piece, prompt)
                choices.append({**fields, "index": len(choices)})
        return encode({**self._fields, "choices": choices, "usage": usage})

    def _event(self, index: int, piece: Piece, *, first_is_empty: bool, extra: bytes, usage: bytes | None) -> bytes:
        logprobs = b"null"
        if self._logprobs:
            logprobs = encode(completion_logprobs(piece.logprobs, piece.offsets, self._tokenizer, first_is_empty))
        token_ids = b',"token_ids":' + encode(piece.token_ids) if self._token_ids else b""
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b%b}' % (
            index,
            encode(piece.text),
            logprobs,
            token_ids,
            extra,
        )
        return self._envelope.event(choice, usage)

    def _choice(self, index: int, choice: Choice, piece: Piece, prompt: pb.PromptInfo) -> dict[str, Any]:
        echoed = self._echoed(index, prompt)
        base = len(echoed.text)
        fields: dict[str, Any] = {
            "index": index,
            "text": echoed.text + piece.text,
            "logprobs": completion_logprobs(
                echoed.logprobs + piece.logprobs,
                echoed.offsets + [base + offset for offset in piece.offsets],
                self._tokenizer,
                first_is_empty=self._echo,
            )
            if self._logprobs
            else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs(prompt.logprobs, self._tokenizer)
        if self._token_ids:
            fields["prompt_token_ids"] = self._prompt(index).token_ids
            fields["token_ids"] = piece.token_ids
        return fields

    def _prompt(self, index: int) -> EchoedPrompt:
        return self._prompts[index // self._n]

    def _echoed(self, index: int, info: pb.PromptInfo) -> Piece:
        """Return the prompt as the first piece of a choice; nothing when it is not echoed."""
        if not self._echo:
            return Piece()
        prompt = self._prompt(index)
        if not self._logprobs:
            return Piece(prompt.text)
        # The first token's entry is empty, for nothing precedes it; the client still sees which token it is.
        logprobs = [pb.TokenLogprobs(token_id=prompt.token_ids[0]), *info.logprobs[1:]]
        return Piece(prompt.text, [], logprobs, self._offsets(prompt))

    def _offsets(self, prompt: EchoedPrompt) -> list[int]:
        detokenizer = self._tokenizer.detokenizer(self._skip_special_tokens)
        offsets, length = [], 0
        for token_id in prompt.token_ids:
            offsets.append(length)
            length += len(detokenizer.push((token_id,)))
        return offsets


def _mean_logprob(answer: tuple[Choice, Piece]) -> float:
    logprobs = [token.logprob for token in answer[1].logprobs]
    return sum(logprobs) / max(len(logprobs), 1)
