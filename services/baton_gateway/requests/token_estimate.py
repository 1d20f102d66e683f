"""Estimates how many sequences and tokens a request may need, before the request is tokenized."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from ..errors import bad_request
from .bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
)

# Assumed bytes of text per token, until the text is tokenized. Reserved tokens that are not used are given back.
_BYTES_PER_TOKEN = 4
_MESSAGE_TOKENS = 4  # of the template, around each message
_OUTPUT_TOKENS = 1024  # of a chat request that does not limit its output
_COMPLETION_TOKENS = 16  # of a completions request without `max_tokens`, as in OpenAI's API


def num_sequences(body: GenerationRequest | TokenizeRequest | DetokenizeRequest, maximum: int) -> int:
    """Return how many sequences a request generates: one per prompt and choice; 1 for a request that generates none.

    maximum: the most sequences of one request. Raises ApiError 400 for more.
    """
    if not isinstance(body, GenerationRequest):
        return 1
    prompts = len(body.prompt) if isinstance(body, CompletionRequest) else 1
    if prompts * body.choices > maximum:
        param = "prompt" if prompts > body.choices else "best_of" if body.best_of is not None else "n"
        raise bad_request(
            f"At most {maximum} sequences are generated for one request; "
            f"{prompts} prompts with {body.choices} choices each are {prompts * body.choices}.",
            param,
        )
    return prompts * body.choices


def expected_tokens(body: GenerationRequest | TokenizeRequest | DetokenizeRequest) -> int:
    """Return how many prompt and output tokens a request may need, estimated before it is tokenized."""
    if isinstance(body, DetokenizeRequest):
        return len(body.tokens)
    if isinstance(body, TokenizeRequest):
        return _text_tokens(body.prompt or "") + (_chat_tokens(body, body.messages) if body.messages else 0)
    if isinstance(body, CompletionRequest):
        sizes = [_text_tokens(prompt) if isinstance(prompt, str) else len(prompt) for prompt in body.prompt]
        output = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return sum(sizes) + output * body.choices * len(sizes)
    assert isinstance(body, ChatCompletionRequest)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _chat_tokens(body, body.messages) + (_OUTPUT_TOKENS if max_tokens is None else max_tokens) * body.choices


def _chat_tokens(body: ChatCompletionRequest | TokenizeRequest, messages: Sequence[Message]) -> int:
    """Estimate the tokens of all that the chat template may write, which includes tools and documents."""
    tools = None if isinstance(body, ChatCompletionRequest) and body.tool_choice == "none" else body.tools
    functions = [(tool.function.description, tool.function.parameters) for tool in tools or ()]
    return (
        sum(
            _text_tokens(message.content or "") + _json_tokens(message.model_extra) + _MESSAGE_TOKENS
            for message in messages
        )
        + _json_tokens(functions)
        + _json_tokens(body.documents)
        + _json_tokens(body.chat_template_kwargs)
    )


def _json_tokens(value: Any) -> int:
    return len(to_json(value)) // _BYTES_PER_TOKEN if value else 0


def _text_tokens(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN + 1
