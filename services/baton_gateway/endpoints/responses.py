"""POST /v1/responses, served as a chat. No response is stored, so each request holds the whole conversation."""

import time
from functools import partial
from typing import Any

from pydantic import ValidationError

from ..answers.reply import Reply
from ..answers.response_output import MessageOutput, Output, PartsOutput
from ..answers.response_shape import ResponseShape
from ..errors import bad_request, from_validation
from ..models.model import ServedModel
from ..requests.bodies import (
    ChatCompletionRequest,
    Function,
    Message,
    NamedSchema,
    ResponseFormat,
    SamplingRequest,
    StreamOptions,
    Tool,
)
from ..requests.fields import NamedTool
from ..requests.grammar import FormatFields
from ..requests.response_body import (
    FunctionCall,
    FunctionTool,
    InputMessage,
    ReasoningInput,
    ResponseRequest,
    TextFormat,
)
from ..telemetry.record import RequestRecord
from .chat import prepare_chat
from .services import Services

TEXT_FORMAT = FormatFields("text.format", "text.format.schema")
WHOLE_CONTEXT = -1


def as_chat(request: ResponseRequest) -> ChatCompletionRequest:
    """Translate a request into a chat request. Raises ApiError for tools that contradict each other, and for
    items that make up no conversation or one that is too large."""
    fields = {name: getattr(request, name) for name in SamplingRequest.model_fields}
    # In this API these fields replace `user`. Among equally good pods, requests of one `user` go to the same pod.
    fields["user"] = request.prompt_cache_key or request.safety_identifier or request.user
    return ChatCompletionRequest(
        **fields,
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        logprobs=request.logprobs or None,
        top_logprobs=request.top_logprobs if request.logprobs else None,
        response_format=_response_format(request),
        tools=[_tool(tool) for tool in request.tools] if request.tools is not None else None,
        tool_choice=_chat_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        truncate_prompt_tokens=WHOLE_CONTEXT if request.truncation == "auto" else None,
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        thinking_token_budget=request.thinking_token_budget,
        # A response always ends with its usage.
        stream_options=StreamOptions(include_usage=True) if request.stream else None,
    )


async def response(services: Services, request: ResponseRequest, record: RequestRecord) -> Reply:
    """Answer a request. Raises ApiError when it cannot be served."""
    chat = await services.turns.run(partial(as_chat, request), record.large_bytes, record.client)
    prepared = await prepare_chat(services, chat, record, "input", TEXT_FORMAT)
    model = prepared.model
    id, tokenizer = f"msg_{record.request_id}", model.served.tokenizer
    output: Output
    if prepared.reader is not None:
        output = PartsOutput(id, tokenizer, request.logprobs)
    else:
        output = MessageOutput(id, tokenizer, request.logprobs)
    shape = ResponseShape(_described(model.served, request, record), output)
    return await services.replies.make_reply(
        model,
        prepared.pool,
        chat,
        [prepared.prompt],
        [prepared.sampling],
        shape,
        record,
        kept=prepared.kept,
        reader=prepared.reader,
    )


def _messages(request: ResponseRequest) -> list[Message]:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    for item in request.input:
        if isinstance(item, InputMessage):
            message = {"role": item.role, "content": item.content}
            if item.role == "assistant" and messages and _only_thoughts(messages[-1]):
                messages[-1] |= message
            else:
                messages.append(message)
        elif isinstance(item, ReasoningInput):
            # Chat templates expect thoughts in the message that they have led to.
            if item.text:
                messages.append({"role": "assistant", "reasoning_content": item.text})
        elif isinstance(item, FunctionCall):
            # Chat templates expect all calls of a turn in the assistant message before them.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
    if not messages:
        raise bad_request("'input' has neither a message nor a call.", "input")
    try:
        return [Message(**message) for message in messages]
    except ValidationError as error:
        # Items that are valid one by one may make up a message that is too large, for example by its calls.
        raise from_validation(error, ("input",)) from None


def _only_thoughts(message: dict[str, Any]) -> bool:
    return message.keys() == {"role", "reasoning_content"}


def _response_format(request: ResponseRequest) -> ResponseFormat | None:
    given = request.text.format if request.text is not None else None
    if given is None:
        return None
    schema = None
    if given.type == "json_schema":
        schema = NamedSchema.model_validate({"name": given.name, "schema": given.schema_, "strict": given.strict})
    return ResponseFormat(type=given.type, json_schema=schema)


def _tool(tool: FunctionTool) -> Tool:
    return Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}, exclude_unset=True)))


def _chat_tool_choice(request: ResponseRequest) -> Any:
    choice = request.tool_choice
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice


def _described(model: ServedModel, request: ResponseRequest, record: RequestRecord) -> dict[str, Any]:
    """Return the members of a response that repeat the request's parameters, with the model's defaults."""
    defaults, choice = model.defaults, request.tool_choice
    text_format = (request.text.format if request.text is not None else None) or TextFormat(type="text")
    described = {
        "id": f"resp_{record.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model.name,
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "store": False,
        "temperature": defaults.temperature if request.temperature is None else request.temperature,
        "text": {"format": text_format.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": {"type": "function", "name": choice.name} if isinstance(choice, NamedTool) else choice or "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": defaults.top_p if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
    }
    # The official schema lets this member be absent, but not null.
    return described if request.user is None else {**described, "user": request.user}
