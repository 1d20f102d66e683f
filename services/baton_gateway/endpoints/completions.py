"""POST /v1/completions."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from baton_proto import serving_pb2 as pb

from ..answers.completion_shape import CompletionShape, EchoedPrompt
from ..answers.reply import Reply
from ..concurrency.pace import Pace
from ..concurrency.turns import LONG_BYTES, Client, Turns
from ..errors import bad_request
from ..models.tokenizer import ModelTokenizer
from ..requests.bodies import CompletionRequest
from ..requests.fields import Prompt
from ..requests.grammar import grammar_of
from ..requests.sampling import (
    bad_word_tokens,
    check_scored,
    fit_prompt,
    output_budget,
    prompt_length,
    sampling_params,
)
from ..telemetry.record import RequestRecord
from .intake import admit
from .services import Services

DEFAULT_MAX_TOKENS = 16
TEXT_BYTES = 16  # added to the length of each text, for the fixed cost of tokenizing it
BATCH_BYTES = LONG_BYTES // 2


async def completion(services: Services, request: CompletionRequest, record: RequestRecord) -> Reply:
    """Answer a completions request. Raises ApiError when it cannot be served."""
    model = await admit(services, request, record)
    tokenizer, turns, settings = model.served.tokenizer, services.turns, services.settings
    if len(request.prompt) > settings.max_prompts:
        raise bad_request(f"At most {settings.max_prompts} prompts are allowed.", "prompt")
    grammar = await turns.run(partial(grammar_of, request, settings), record.large_bytes, record.client)
    with record.tokenizing():
        tokenized = await _tokenize(request, tokenizer, turns, record.client)
        words = request.bad_words or ()
        bad_words = await turns.run(
            partial(bad_word_tokens, words, tokenizer), TEXT_BYTES * len(words) + sum(map(len, words)), record.client
        )
    pool = services.catalog.pool(model, record.identity, prompt_length(request, *tokenized))
    record.pool = pool.spec.name
    limits = pool.limits()
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    pace = Pace()
    prompts: list[EchoedPrompt] = []
    for prompt, token_ids in zip(request.prompt, tokenized, strict=True):
        fitted = fit_prompt(token_ids, request, max_tokens, limits, "prompt")
        output_budget(len(fitted), max_tokens, limits, "prompt")
        await pace.yield_to_loop()
        if request.echo:
            text = _text_of(prompt, token_ids, fitted, request, tokenizer)
            prompts.append(EchoedPrompt(fitted, await turns.run(text, len(fitted), record.client)))
        else:
            prompts.append(EchoedPrompt(fitted))
    _check_scored(request, prompts)
    params = sampling_params(
        request,
        model.served,
        limits,
        # A pod generates at least one token. When the client asks for 0 tokens, the generated one is dropped.
        max_tokens=max(max_tokens, 1),
        logprobs=0 if request.logprobs is None and request.selects else request.logprobs,
        prompt_logprobs=_prompt_logprobs(request),
        grammar=grammar,
        bad_words=bad_words,
    )
    shape = CompletionShape(
        id=f"cmpl-{record.request_id}",
        created=int(time.time()),
        model=model.name,
        tokenizer=tokenizer,
        prompts=prompts,
        n=request.choices,
        kept=request.n or 1,
        skip_special_tokens=request.skip_special_tokens is not False,
        echo=bool(request.echo),
        token_ids=bool(request.return_token_ids),
        logprobs=request.logprobs is not None,
        prompt_logprobs=request.prompt_logprobs is not None,
    )
    fitting = [prompt.token_ids for prompt in prompts]
    return await services.replies.make_reply(
        model, pool, request, fitting, _each_seeded(request, params), shape, record, silent=max_tokens == 0
    )


async def _tokenize(
    request: CompletionRequest, tokenizer: ModelTokenizer, turns: Turns, client: Client
) -> list[list[int]]:
    """Return the tokens of each prompt. Short texts are tokenized together, in batches that take little time."""
    special = request.add_special_tokens is not False
    tokenized: list[list[int]] = []
    for texts, size in _batches(request.prompt):

        def encode(texts: Sequence[Prompt] = texts) -> list[list[int]]:
            return [tokenizer.encode_now(text, special) if isinstance(text, str) else text for text in texts]

        tokenized.extend(await turns.run(encode, size, client))
    return tokenized


def _batches(prompts: Sequence[Prompt]) -> Iterator[tuple[Sequence[Prompt], int]]:
    """Split prompts into runs of about `BATCH_BYTES`, each with its size in bytes of text."""
    start = size = 0
    for end, prompt in enumerate(prompts, start=1):
        size += TEXT_BYTES + len(prompt) if isinstance(prompt, str) else 0
        if size > BATCH_BYTES:
            yield prompts[start:end], size
            start, size = end, 0
    yield prompts[start:], size


def _each_seeded(request: CompletionRequest, params: pb.SamplingParams) -> Iterator[pb.SamplingParams]:
    """Yield the parameters of each prompt. If the request has no seed, equal prompts get different answers."""
    for _ in request.prompt:
        yield params
        if request.seed is None:
            params.seed = secrets.randbits(64)


def _text_of(
    prompt: Prompt, token_ids: list[int], fitted: list[int], request: CompletionRequest, tokenizer: ModelTokenizer
) -> Callable[[], str]:
    """Return a function that returns the text of a prompt. fitted: the tokens that are left after truncation."""
    if isinstance(prompt, str) and len(fitted) == len(token_ids):
        return lambda: prompt
    return partial(tokenizer.decode, fitted, skip_special_tokens=request.skip_special_tokens is not False)


def _check_scored(request: CompletionRequest, prompts: Sequence[EchoedPrompt]) -> None:
    """Refuse an answer with too many log probabilities of its prompts. Raises ApiError naming the field."""
    tokens = sum(len(prompt.token_ids) for prompt in prompts) * (request.n or 1)
    check_scored(tokens, request.prompt_logprobs, "prompt_logprobs")
    check_scored(tokens, request.logprobs if request.echo else None, "logprobs")


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return how many alternatives per prompt token are needed. With `echo`, `logprobs` also covers the prompt."""
    wanted = [request.prompt_logprobs] if request.prompt_logprobs is not None else []
    if request.echo and request.logprobs is not None:
        wanted.append(request.logprobs)
    return max(wanted, default=None)
