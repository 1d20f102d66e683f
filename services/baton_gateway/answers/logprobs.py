"""Writes log probabilities in the formats of the API, in parts, because a prompt may have very many.

They are natural logarithms. JSON has no infinity, so the smallest value is -9999.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from baton_proto import serving_pb2 as pb

from ..models.tokenizer import ModelTokenizer
from .shapes import LOGPROBS_RUN, encoded_list

LEAST = -9999.0


def finite(logprob: float) -> float:
    # The comparison is false for NaN, which is then replaced too.
    return logprob if logprob >= LEAST else LEAST


def chat_logprobs(tokens: Iterable[pb.TokenLogprobs], tokenizer: ModelTokenizer) -> Iterator[dict[str, Any]]:
    """Yield the entries of `logprobs.content` in a chat completion."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    for token in tokens:
        yield {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [entry(*pair) for pair in zip(token.top_token_ids, token.top_logprobs, strict=True)],
        }


def encoded_chat_logprobs(tokens: Iterable[pb.TokenLogprobs], tokenizer: ModelTokenizer) -> Iterator[bytes]:
    """Yield the `logprobs` of a chat completion as JSON in parts."""
    yield b'{"content":'
    yield from encoded_list(chat_logprobs(tokens, tokenizer), LOGPROBS_RUN)
    yield b',"refusal":null}'


def completion_logprobs(
    tokens: Sequence[pb.TokenLogprobs], offsets: Iterable[int], tokenizer: ModelTokenizer, first_is_empty: bool = False
) -> Iterator[bytes]:
    """Yield the `logprobs` of a completion as JSON in parts.

    first_is_empty: the first token begins an echoed prompt, so nothing predicts it.
    """
    empty = 1 if first_is_empty and tokens else 0
    predicted, nothing = tokens[empty:], [None] * empty
    yield b'{"tokens":'
    yield from encoded_list(tokenizer.token_text(token.token_id) for token in tokens)
    yield b',"token_logprobs":'
    yield from encoded_list(chain(nothing, (finite(token.logprob) for token in predicted)))
    yield b',"top_logprobs":'
    yield from encoded_list(chain(nothing, (_top(token, tokenizer) for token in predicted)), LOGPROBS_RUN)
    yield b',"text_offset":'
    yield from encoded_list(offsets)
    yield b"}"


def _top(token: pb.TokenLogprobs, tokenizer: ModelTokenizer) -> dict[str, float]:
    """Return log probabilities of the alternatives and the chosen token by text. Equal texts keep the likelier one."""
    top: dict[str, float] = {}
    alternatives = zip(token.top_token_ids, token.top_logprobs, strict=True)
    for token_id, logprob in [*alternatives, (token.token_id, token.logprob)]:
        top.setdefault(tokenizer.token_text(token_id), finite(logprob))
    return top


def encoded_prompt_logprobs(tokens: Sequence[pb.TokenLogprobs], tokenizer: ModelTokenizer) -> Iterator[bytes]:
    """Yield vLLM's `prompt_logprobs` as JSON: null, then for each later token itself and its alternatives by id."""
    return encoded_list(chain([None], _prompt_logprobs(tokens[1:], tokenizer)), LOGPROBS_RUN)


def _prompt_logprobs(tokens: Iterable[pb.TokenLogprobs], tokenizer: ModelTokenizer) -> Iterator[dict[str, Any]]:

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    for token in tokens:
        entries = {
            str(token_id): entry(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(
                zip(token.top_token_ids, token.top_logprobs, strict=True), start=1
            )
        }
        entries.setdefault(str(token.token_id), entry(token.token_id, token.logprob, token.rank))
        yield entries
