"""Turns the messages of a request into the conversation that a chat template renders."""

from collections.abc import Sequence

from ..models.conversation import Conversation
from ..tools.tool_calls import with_parsed_arguments
from .bodies import ChatTemplateRequest, Message, TokenizeRequest, Tool


def read_conversation(
    request: ChatTemplateRequest | TokenizeRequest,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    param: str = "messages",
) -> Conversation:
    """Build the conversation of a request from its messages and its template options."""
    continues = bool(request.continue_final_message)
    prompted = request.add_generation_prompt
    return Conversation(
        messages=[with_parsed_arguments(message.model_dump()) for message in messages],
        add_generation_prompt=not continues if prompted is None else prompted,
        continue_final_message=continues,
        variables=request.chat_template_kwargs or {},
        tools=[tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
        add_special_tokens=bool(getattr(request, "add_special_tokens", None)),
        param=param,
    )
