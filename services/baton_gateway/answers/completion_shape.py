"""Answers of /v1/completions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from baton_proto import serving_pb2 as pb

from ..errors import ApiError
from ..models.tokenizer import ModelTokenizer
from .choice import Choice, Piece
from .logprobs import completion_logprobs, encoded_prompt_logprobs
from .shapes import Envelope, encoded_list

encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The tokens of a prompt and, if the client asked for `echo`, its text."""

    token_ids: list[int]
    text: str = ""


class CompletionShape:
    """Writes text completions, whole or in chunks."""

    keeps = False

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
        """n: choices per prompt. kept: how many of them the answer has: those with the highest mean log probability.

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

    def opening(self, index: int, prompt: pb.PromptInfo, usage: bytes | None) -> Iterable[bytes]:
        if not self._echo and not self._token_ids:
            return ()
        extra = b',"prompt_token_ids":' + encode(self._prompt(index).token_ids) if self._token_ids else b""
        logprobs = self._prompt_tokens(index, prompt), self._prompt_offsets(index), True
        text = self._prompt(index).text if self._echo else ""
        return self._event(index, text, [], *logprobs, extra=extra, usage=usage)

    def chunk(self, index: int, piece: Piece, usage: bytes | None) -> bytes:
        if not piece.text and not piece.logprobs and not (self._token_ids and piece.token_ids):
            return b""
        if self._echo and piece.offsets:
            base = len(self._prompt(index).text)
            piece.offsets = [base + offset for offset in piece.offsets]
        event = self._event(index, piece.text, piece.token_ids, piece.logprobs, piece.offsets, extra=b"", usage=usage)
        return b"".join(event)

    def closing(self, index: int, choice: Choice, usage: bytes | None) -> Iterable[bytes]:
        event = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            index,
            encode(choice.finish_reason),
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
        before, count = encode(self._fields)[:-1] + b',"choices":[', 0
        for number, prompt in enumerate(prompts):
            group = answers[number * self._n : (number + 1) * self._n]
            if self._kept < self._n:
                group = sorted(group, key=_mean_logprob, reverse=True)[: self._kept]
            for choice, piece in group:
                yield before
                yield from self._choice(count, number * self._n, choice, piece, prompt)
                before, count = b",", count + 1
        yield b'],"usage":%b}' % encode(usage)

    def _event(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        logprobs: Sequence[pb.TokenLogprobs],
        offsets: Iterable[int],
        first_is_empty: bool = False,
        *,
        extra: bytes,
        usage: bytes | None,
    ) -> Iterator[bytes]:
        start, end = self._envelope.around(usage)
        yield b'%b{"index":%d,"text":%b,"logprobs":' % (start, index, encode(text))
        if self._logprobs:
            yield from completion_logprobs(logprobs, offsets, self._tokenizer, first_is_empty)
        else:
            yield b"null"
        ids = b',"token_ids":' + encode(token_ids) if self._token_ids else b""
        yield b',"finish_reason":null%b%b}%b' % (ids, extra, end)

    def _choice(self, index: int, first: int, choice: Choice, piece: Piece, prompt: pb.PromptInfo) -> Iterator[bytes]:
        """index: the choice's index in the answer. first: the number of any choice of the same prompt."""
        text = self._prompt(first).text if self._echo else ""
        yield b'{"index":%d,"text":%b,"logprobs":' % (index, encode(text + piece.text))
        if self._logprobs:
            base = len(text)
            yield from completion_logprobs(
                [*self._prompt_tokens(first, prompt), *piece.logprobs],
                chain(self._prompt_offsets(first), (base + offset for offset in piece.offsets)),
                self._tokenizer,
                first_is_empty=self._echo,
            )
        else:
            yield b"null"
        yield b',"finish_reason":%b,"stop_reason":%b' % (encode(choice.finish_reason), encode(choice.stop_reason))
        if self._prompt_logprobs:
            yield b',"prompt_logprobs":'
            yield from encoded_prompt_logprobs(prompt.logprobs, self._tokenizer)
        if self._token_ids:
            yield b',"prompt_token_ids":'
            yield from encoded_list(self._prompt(first).token_ids)
            yield b',"token_ids":'
            yield from encoded_list(piece.token_ids)
        yield b"}"

    def _prompt(self, index: int) -> EchoedPrompt:
        return self._prompts[index // self._n]

    def _prompt_tokens(self, index: int, info: pb.PromptInfo) -> Sequence[pb.TokenLogprobs]:
        """Return the log probabilities of an echoed prompt; none if the client did not ask for them."""
        if not self._echo or not self._logprobs:
            return ()
        # The first token has no log probability, because nothing precedes it. The client still sees which token it is.
        return [pb.TokenLogprobs(token_id=self._prompt(index).token_ids[0]), *info.logprobs[1:]]

    def _prompt_offsets(self, index: int) -> Iterator[int]:
        if not self._echo or not self._logprobs:
            return
        detokenizer = self._tokenizer.detokenizer(self._skip_special_tokens)
        length = 0
        for token_id in self._prompt(index).token_ids:
            yield length
            length += len(detokenizer.push((token_id,)))


def _mean_logprob(answer: tuple[Choice, Piece]) -> float:
    logprobs = [token.logprob for token in answer[1].logprobs]
    return sum(logprobs) / max(len(logprobs), 1)
