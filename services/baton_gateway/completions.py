"""POST /v1/completions."""

import time

from baton_gateway.catalog import Model
from baton_gateway.completion_shape import CompletionShape, EchoedPrompt
from baton_gateway.errors import bad_request
from baton_gateway.gateway import Gateway
from baton_gateway.grammar import grammar_of
from baton_gateway.protocol import CompletionRequest, Prompt
from baton_gateway.record import RequestRecord
from baton_gateway.reply import Reply
from baton_gateway.sampling import fit_prompt, output_budget, prompt_length, sampling_params
from baton_gateway.tokenizer import ModelTokenizer

DEFAULT_MAX_TOKENS = 16


async def completion(gateway: Gateway, model: Model, request: CompletionRequest, record: RequestRecord) -> Reply:
    """Answer a completions request. Raises ApiError for what cannot be answered."""
    tokenizer = model.served.tokenizer
    if len(request.prompt) > gateway.settings.max_prompts:
        raise bad_request(f"At most {gateway.settings.max_prompts} prompts are allowed.", "prompt")
    grammar = grammar_of(request, gateway.settings)
    with record.tokenizing():
        tokenized = [await _tokenize(prompt, request, tokenizer) for prompt in request.prompt]
    pool = gateway.pool(model, record, prompt_length(request, *tokenized))
    limits = pool.limits()
    asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    prompts = [
        _echoed(prompt, token_ids, fit_prompt(token_ids, request, asked, limits, "prompt"), request, tokenizer)
        for prompt, token_ids in zip(request.prompt, tokenized, strict=True)
    ]
    # A pod generates at least one token; a request for none gets its prompt scored and that token dropped.
    sampling = [
        sampling_params(
            request,
            model.served,
            limits,
            max_tokens=max(output_budget(len(prompt.token_ids), asked, limits, "prompt"), 1),
            logprobs=0 if request.logprobs is None and request.selects else request.logprobs,
            prompt_logprobs=_prompt_logprobs(request),
            grammar=grammar,
        )
        for prompt in prompts
    ]
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
    token_ids = [prompt.token_ids for prompt in prompts]
    return gateway.reply(model, pool, request, token_ids, sampling, shape, record, silent=asked == 0)


async def _tokenize(prompt: Prompt, request: CompletionRequest, tokenizer: ModelTokenizer) -> list[int]:
    if isinstance(prompt, str):
        return await tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens is not False)
    return prompt


def _echoed(
    prompt: Prompt, token_ids: list[int], fitted: list[int], request: CompletionRequest, tokenizer: ModelTokenizer
) -> EchoedPrompt:
    """Return a prompt, cut to `fitted`, with its text where that is part of the answer."""
    if not request.echo:
        return EchoedPrompt(fitted)
    if isinstance(prompt, str) and len(fitted) == len(token_ids):
        return EchoedPrompt(fitted, prompt)
    return EchoedPrompt(fitted, tokenizer.decode(fitted, skip_special_tokens=request.skip_special_tokens is not False))


def _prompt_logprobs(request: CompletionRequest) -> int | None:
    """Return how many alternatives per prompt token are needed: echoed log probabilities cover the prompt too."""
    wanted = [request.prompt_logprobs] if request.prompt_logprobs is not None else []
    if request.echo and request.logprobs is not None:
        wanted.append(request.logprobs)
    return max(wanted, default=None)
