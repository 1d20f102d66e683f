"""Renders a conversation as a prompt, as `apply_chat_template` of transformers does."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import jinja2

from ..bounds import MAX_RENDER_S, MAX_RENDERED_CHARS
from ..concurrency.inline import TooLongInlineError, inline_deadline
from ..errors import bad_request
from .conversation import Conversation, Role
from .template_environment import DEADLINE, TemplateEnvironment, TooSlowError
from .template_text import TemplateText, concat

# Variables that the gateway itself passes to a template. A request may not replace them.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
# A role is one of a few known words. Many templates put it into a control token, so it counts as template text.
ROLES = {role: TemplateText.written(role) for role in get_args(Role)}
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A compiled Jinja chat template. Templates come with models, so they run in a sandbox."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """tokens: special tokens by the names the template uses.

        Raises jinja2.TemplateError when the template cannot be compiled.
        """
        self._template = TemplateEnvironment().compile_template(source)
        self._tokens = {name: TemplateText.written(token) for name, token in tokens.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        param: str = "messages",
    ) -> TemplateText:
        """Render `messages` as a prompt in which the template's own text can be told from the request's.

        continue_final_message: leave the last message open, so that the model continues it.
        variables: more variables for the template. tools: functions that the model may call.
        documents: texts that the model is to use.
        param: the request field that an error names.
        Raises ApiError when the template refuses the messages, or takes too long, and TooLongInlineError when it takes
        too long for the event loop.
        """
        if reserved := RESERVED.intersection(variables):
            raise bad_request(f"'chat_template_kwargs' may not set '{min(reserved)}'.", "chat_template_kwargs")
        given = [_given(message) for message in messages]
        final = given[-1].get("content")
        if continue_final_message:
            if not isinstance(final, str):
                raise bad_request("The final message has no content to continue.", "continue_final_message")
            given[-1]["content"] = final + CONTINUE_TAG
        given_variables = {
            **self._tokens,
            **variables,
            "messages": given,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = self._render(given_variables, param)
        return _cut_at_tag(prompt, str(final)) if continue_final_message else prompt

    def render_conversation(self, conversation: Conversation) -> TemplateText:
        """Render a conversation. Raises ApiError when the template refuses it."""
        return self.render(
            conversation.messages,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            variables=conversation.variables,
            tools=conversation.tools,
            documents=conversation.documents,
            param=conversation.param,
        )

    def _render(self, variables: Mapping[str, Any], param: str) -> TemplateText:
        last, inline = time.monotonic() + MAX_RENDER_S, inline_deadline()
        try:
            # A mapping instead of keyword arguments, so that a variable named `self` is no error.
            pieces = self._template.generate({**variables, DEADLINE: min(last, inline)})
            return _bounded(pieces, min(last, inline), param)
        except TooSlowError:
            if inline < last:
                raise TooLongInlineError from None
            raise bad_request(
                f"The chat template takes more than {MAX_RENDER_S:.0f} seconds for this.", param
            ) from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
            raise bad_request(f"The chat template refused the messages: {e}", param) from None
        except RecursionError:
            raise bad_request("The messages are nested too deeply for the chat template.", param) from None


def _bounded(pieces: Iterator[str], until: float, param: str) -> TemplateText:
    """Join the pieces that a template renders. Raises ApiError when they are too long, TooSlowError after `until`."""
    written, size = [], 0
    for piece in pieces:
        written.append(piece)
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise bad_request(f"The chat template renders this as more than {MAX_RENDERED_CHARS} characters.", param)
        if time.monotonic() > until:
            raise TooSlowError
    return concat(written)


def _given(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a message that are not null."""
    given = {key: value for key, value in message.items() if value is not None}
    given["role"] = ROLES[given["role"]]
    return given


def _cut_at_tag(prompt: TemplateText, final: str) -> TemplateText:
    tag = CONTINUE_TAG.strip()
    if tag not in prompt or final.strip() not in prompt:
        raise bad_request("The chat template does not keep the final message.", "continue_final_message")
    start = prompt.rindex(tag)
    if prompt[start : start + len(CONTINUE_TAG)] == CONTINUE_TAG:
        return prompt[:start]
    return prompt[:start].rstrip()
