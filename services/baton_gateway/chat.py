"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from typing import Any

from baton_gateway.chat_shape import ChatShape
from baton_gateway.errors import bad_request
from baton_gateway.gateway import Gateway
from baton_gateway.grammar import grammar_of
from baton_gateway.model import ServedModel
from baton_gateway.protocol import ChatCompletionRequest, Message, NamedTool, Tool
from baton_gateway.record import RequestRecord
from baton_gateway.reply import Reply
from baton_gateway.sampling import fit_prompt, output_budget, sampling_params
from baton_gateway.tool_calls import with_parsed_arguments


def chat_prompt(
    model: ServedModel,
    messages: Sequence[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: dict[str, Any] | None,
    tools: Sequence[Tool] | None = None,
) -> str:
    """Write a conversation as the model's prompt. Raises ApiError when its template cannot."""
    if model.template is None:
        raise bad_request("This model has no chat template; use /v1/completions.", "messages")
    continues = bool(continue_final_message)
    return model.template.render(
        [with_parsed_arguments(message.model_dump()) for message in messages],
        add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continues,
        variables=variables or {},
        tools=[tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
    )


async def chat_completion(gateway: Gateway, request: ChatCompletionRequest, record: RequestRecord) -> Reply:
    """Answer a chat request. Raises ApiError for what cannot be answered."""
    model = gateway.model
    gateway.check_model(request.model, record)
    grammar = grammar_of(request, gateway.settings)
    text = chat_prompt(
        model,
        request.messages,
        request.add_generation_prompt,
        request.continue_final_message,
        request.chat_template_kwargs,
        None if request.tool_choice == "none" else request.tools,
    )
    # A template writes the special tokens itself.
    token_ids = await model.tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))
    limits = gateway.limits()
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    prompt = fit_prompt(token_ids, request, asked, limits, "messages")
    params = sampling_params(
        request,
        model,
        limits,
        max_tokens=output_budget(len(prompt), asked, limits, "messages"),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        grammar=grammar,
    )
    called = request.tool_choice.name if isinstance(request.tool_choice, NamedTool) else None
    shape = ChatShape(
        id=f"chatcmpl-{record.request_id}",
        created=int(time.time()),
        model=model.name,
        tokenizer=model.tokenizer,
        prompt_token_ids=prompt,
        token_ids=bool(request.return_token_ids),
        logprobs=bool(request.logprobs),
        prompt_logprobs=request.prompt_logprobs is not None,
        calls=request.tool_choice == "required" or called is not None,
        called=called,
    )
    return gateway.reply(request, [prompt], [params], shape, record)
