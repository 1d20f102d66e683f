"""Log probabilities in the forms of the API. Natural logarithms; JSON has no infinity, so the least is -9999."""

from collections.abc import Sequence
from typing import Any

from baton_gateway.tokenizer import ModelTokenizer
from baton_proto import serving_pb2 as pb

LEAST = -9999.0


def finite(logprob: float) -> float:
    # The comparison is false for NaN, which is then replaced too.
    return logprob if logprob >= LEAST else LEAST


def chat_logprobs(tokens: Sequence[pb.TokenLogprobs], tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Return what chat completions call `logprobs`."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [entry(*pair) for pair in zip(token.top_token_ids, token.top_logprobs, strict=True)],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[pb.TokenLogprobs], offsets: Sequence[int], tokenizer: ModelTokenizer, first_is_empty: bool = False
) -> dict[str, Any]:
    """Return what completions call `logprobs`.

    first_is_empty: the first token begins an echoed prompt, so nothing predicts it.
    """
    logprobs: list[float | None] = [finite(token.logprob) for token in tokens]
    top: list[dict[str, float] | None] = [_top(token, tokenizer) for token in tokens]
    if first_is_empty and tokens:
        logprobs[0] = top[0] = None
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in tokens],
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": list(offsets),
    }


def _top(token: pb.TokenLogprobs, tokenizer: ModelTokenizer) -> dict[str, float]:
    """Return the alternatives and the chosen token by text; where two have the same text, the likelier."""
    top: dict[str, float] = {}
    alternatives = zip(token.top_token_ids, token.top_logprobs, strict=True)
    for token_id, logprob in [*alternatives, (token.token_id, token.logprob)]:
        top.setdefault(tokenizer.token_text(token_id), finite(logprob))
    return top


def prompt_logprobs(tokens: Sequence[pb.TokenLogprobs], tokenizer: ModelTokenizer) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: per prompt token but the first, the chosen token and alternatives by id."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    result: list[dict[str, Any] | None] = [None]
    for token in tokens[1:]:
        entries = {
            str(token_id): entry(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(
                zip(token.top_token_ids, token.top_logprobs, strict=True), start=1
            )
        }
        entries.setdefault(str(token.token_id), entry(token.token_id, token.logprob, token.rank))
        result.append(entries)
    return result
