"""Turns the messages of a request into the conversation that a chat template renders."""

from collections.abc import Sequence
from typing import Any

from ..models.conversation import Conversation
from ..reasoning.thought_reader import ThoughtReader, thoughts_of
from ..tools.tool_calls import with_parsed_arguments
from .bodies import ChatTemplateRequest, Message, TokenizeRequest, Tool


def read_conversation(
    request: ChatTemplateRequest | TokenizeRequest,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    thoughts: type[ThoughtReader] | None = None,
    param: str = "messages",
) -> Conversation:
    """Build the conversation of a request from its messages and its template options.

    thoughts: the format in which the model writes thoughts, if it does.
    """
    continues = bool(request.continue_final_message)
    prompted = request.add_generation_prompt
    return Conversation(
        messages=[_as_templates_take_it(message, thoughts) for message in messages],
        add_generation_prompt=not continues if prompted is None else prompted,
        continue_final_message=continues,
        variables={**_effort(request.reasoning_effort), **(request.chat_template_kwargs or {})},
        documents=request.documents or None,
        tools=[tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
        add_special_tokens=bool(getattr(request, "add_special_tokens", None)),
        param=param,
    )


def _as_templates_take_it(message: Message, reader: type[ThoughtReader] | None) -> dict[str, Any]:
    given = with_parsed_arguments(message.model_dump())
    thoughts = thoughts_of(given) if message.role == "assistant" else None
    return given if thoughts is None or reader is None else reader.restored(given, thoughts)


def _effort(effort: str | None) -> dict[str, Any]:
    """Return the template variables that set how much the model thinks, or turn its thoughts off."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none"}
