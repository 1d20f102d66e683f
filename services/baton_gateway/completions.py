"""POST /v1/completions."""

import time

from baton_gateway.completion_shape import CompletionShape, EchoedPrompt
from baton_gateway.errors import bad_request
from baton_gateway.gateway import Gateway
from baton_gateway.grammar import grammar_of
from baton_gateway.pods import Limits
from baton_gateway.protocol import CompletionRequest, Prompt
from baton_gateway.record import RequestRecord
from baton_gateway.reply import Reply
from baton_gateway.sampling import fit_prompt, output_budget, sampling_params
from baton_gateway.tokenizer import ModelTokenizer

DEFAULT_MAX_TOKENS = 16


async def completion(gateway: Gateway, request: CompletionRequest, record: RequestRecord) -> Reply:
    """Answer a completions request. Raises ApiError for what cannot be answered."""
    model = gateway.model
    gateway.check_model(request.model, record)
    if len(request.prompt) > gateway.settings.max_prompts:
        raise bad_request(f"At most {gateway.settings.max_prompts} prompts are allowed.", "prompt")
    grammar = grammar_of(request, gateway.settings)
    limits = gateway.limits()
    asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    prompts = [await _tokenize(prompt, request, asked, model.tokenizer, limits) for prompt in request.prompt]
    # A pod generates at least one token; a request for none gets its prompt scored and that token dropped.
    sampling = [
        sampling_params(
            request,
            model,
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
        tokenizer=model.tokenizer,
        prompts=prompts,
        n=request.choices,
        kept=request.n or 1,
        skip_special_tokens=request.skip_special_tokens is not False,
        echo=bool(request.echo),
        token_ids=bool(request.return_token_ids),
        logprobs=request.logprobs is not None,
        prompt_logprobs=request.prompt_logprobs is not None,
    )
    return gateway.reply(request, [prompt.token_ids for prompt in prompts], sampling, shape, record, silent=asked == 0)


async def _tokenize(
    prompt: Prompt, request: CompletionRequest, asked: int, tokenizer: ModelTokenizer, limits: Limits
) -> EchoedPrompt:
    if isinstance(prompt, str):
        token_ids = await tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens is not False)
    else:
        token_ids = prompt
    fitted = fit_prompt(token_ids, request, asked, limits, "prompt")
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
