"""Turns a request into sampling parameters in which every default is resolved."""

import secrets
from array import array
from collections.abc import Sequence
from typing import TypeVar

from baton_proto import serving_pb2 as pb

from ..bounds import MAX_SCORED
from ..errors import bad_request, context_length_exceeded
from ..models.model import ServedModel
from ..models.tokenizer import ModelTokenizer
from ..routing.pods import PodLimits
from .bodies import GenerationRequest

# Clients may send top_p 0, which keeps only the most likely token. Pods accept only a top_p above 0.
LEAST_TOP_P = 1e-6

T = TypeVar("T")


def sampling_params(
    request: GenerationRequest,
    model: ServedModel,
    limits: PodLimits,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: pb.Grammar | None,
    bad_words: Sequence[pb.TokenSequence],
) -> pb.SamplingParams:
    """Return the sampling parameters of a request. bad_words: as `bad_word_tokens` returns them.

    Raises ApiError for token ids outside the vocabulary and for contradictions.
    """
    defaults = model.defaults
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"'min_tokens' ({min_tokens}) is more than the {max_tokens} tokens allowed.", "min_tokens")
    _check_vocabulary(request, limits.vocab_size)
    return pb.SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_given(request.temperature, defaults.temperature),
        top_k=max(_given(request.top_k, defaults.top_k), 0),
        top_p=max(_given(request.top_p, defaults.top_p), LEAST_TOP_P),
        min_p=_given(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        logit_bias=request.logit_bias,
        allowed_token_ids=request.allowed_token_ids,
        bad_words=bad_words,
        stop_token_ids=request.stop_token_ids,
        # Where the grammar allows more output, only an EOS token can end it, so `ignore_eos` has no effect.
        eos_token_ids=() if request.ignore_eos and grammar is None else model.eos_token_ids,
        seed=secrets.randbits(64) if request.seed is None else request.seed % 2**64,
        n=request.choices,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def prompt_length(request: GenerationRequest, *prompts: Sequence[int]) -> int:
    """Return the length of the longest prompt in tokens, truncated to `truncate_prompt_tokens` unless that is -1."""
    longest, keep = max(map(len, prompts), default=0), request.truncate_prompt_tokens
    return min(longest, keep) if keep is not None and keep > 0 else longest


def fit_prompt(
    token_ids: list[int], request: GenerationRequest, requested: int | None, limits: PodLimits, param: str
) -> list[int]:
    """Check a prompt's tokens, and drop the first ones if the request asks for truncation.

    requested: how many output tokens the request asks for. param: the field that holds the prompt.
    """
    keep = request.truncate_prompt_tokens
    if keep is not None:
        if keep > limits.max_model_len:
            raise bad_request(
                f"'truncate_prompt_tokens' ({keep}) is more than the model's {limits.max_model_len} tokens.",
                "truncate_prompt_tokens",
            )
        token_ids = token_ids[-(keep if keep > 0 else max(limits.max_model_len - max(requested or 0, 1), 1)) :]
    if not token_ids:
        raise bad_request("The prompt is empty.", param)
    # A prompt that is too long is refused later, so its ids need no check.
    if len(token_ids) <= limits.max_model_len and not _all_below(limits.vocab_size, token_ids):
        raise bad_request(f"Token ids must be from 0 to {limits.vocab_size - 1}.", param)
    return token_ids


def _all_below(size: int, token_ids: list[int]) -> bool:
    """Return whether all ids are from 0 up to but not including `size`."""
    try:
        array("I", token_ids)  # refuses a negative number, and takes half the time of min()
    except OverflowError:
        return False
    return max(token_ids) < size


def check_scored(tokens: int, alternatives: int | None, param: str) -> None:
    """Refuse an answer with too many log probabilities of prompt tokens: a pod sends those of a prompt in one message.

    alternatives: for each token; None = there are no log probabilities.
    """
    if alternatives is not None and tokens * (alternatives + 1) > MAX_SCORED:
        raise bad_request(
            f"'{param}' would bring more than {MAX_SCORED} log probabilities of prompt tokens into the answer.", param
        )


def output_budget(prompt_tokens: int, requested: int | None, limits: PodLimits, param: str) -> int:
    """Return how many tokens may be generated: the requested number, or else all that fit in the context."""
    most = limits.max_model_len
    if prompt_tokens + max(requested or 0, 1) <= most:
        return requested if requested is not None else most - prompt_tokens
    # LangChain recognises a prompt that is too long by "is too long", LiteLLM by the beginning of the message.
    has = "is too long: it has" if prompt_tokens >= most else "has"
    output = "" if requested is None else f" and the output {requested}"
    raise context_length_exceeded(
        f"This model's maximum context length is {most} tokens. However, the prompt {has} {prompt_tokens} tokens"
        f"{output}, {prompt_tokens + max(requested or 0, 1)} together. Please shorten the prompt or ask for less "
        "output.",
        param,
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_vocabulary(request: GenerationRequest, vocab_size: int) -> None:
    fields: dict[str, Sequence[int]] = {
        "logit_bias": list(request.logit_bias or ()),
        "stop_token_ids": request.stop_token_ids or (),
        "allowed_token_ids": request.allowed_token_ids or (),
    }
    for name, token_ids in fields.items():
        if token_ids and max(token_ids) >= vocab_size:
            raise bad_request(f"'{name}' has token ids outside the vocabulary of {vocab_size}.", name)


def bad_word_tokens(words: Sequence[str], tokenizer: ModelTokenizer) -> list[pb.TokenSequence]:
    """Return the token sequences of words as they are at the beginning of a text. The sequence after a space is
    returned, too, if it has as many tokens and another first token."""
    sequences = []
    for word in words:
        bare = tokenizer.encode_now(word.lstrip() or word, add_special_tokens=False)
        spaced = tokenizer.encode_now(" " + word.lstrip(), add_special_tokens=False)
        sequences.append(bare)
        if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return [pb.TokenSequence(token_ids=sequence) for sequence in sequences if sequence]
