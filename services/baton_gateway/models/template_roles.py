"""Finds the roles that a chat template renders, so that no message is silently left out of a prompt.

Templates differ: some raise an error for an unsupported role, others leave the message out. So each template is probed
with small conversations when it is loaded. A role is known if its message's content appears in the prompt of every
probe that the template accepts. A conversation with a message of another role is rendered once more, with marks in
place of the contents of such messages. The marks in the result show whether these messages are rendered after all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ApiError, bad_request
from ..tools.tool_calls import CallArguments
from .chat_template import ChatTemplate
from .conversation import Conversation
from .template_text import TemplateText

Message = Mapping[str, Any]

INSTRUCTIONS = frozenset({"system", "developer"})
LATER = "later "  # prefix of a role of INSTRUCTIONS whose message follows a message of another role

_USER, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_CALL = {"name": "probe", "arguments": CallArguments({}, "{}")}
_CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": _CALL}],
}
_TOOL = {"name": "probe", "description": "Probe.", "parameters": {"type": "object", "properties": {}}}


class TemplateRoles:
    """The roles that one template renders, as its probes have shown."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.prompts: list[TemplateText] = []  # the prompts of all probes that the template accepted
        self._known = {place for place, probes in _PROBES.items() if self._renders(probes)}
        second = "developer" if "developer" in self._known else "system"
        pairs = ("system", "system"), ("system", second), (second, "system")
        self._takes_several = self._renders([[*map(_marked, pair, range(2)), _USER] for pair in pairs])

    def fit(self, conversation: Conversation) -> Conversation:
        """Return a conversation whose roles the template renders.

        A developer message becomes a system message if the template only knows the latter. Several such messages at
        the beginning are joined by blank lines into one if the template does not render several.
        Raises ApiError naming the message that the template would leave out, or when it refuses the messages.
        """
        messages = [self._renamed(place, message) for place, message in _placed(conversation.messages)]
        run = sum(place in INSTRUCTIONS for place, _ in _placed(messages))
        if run > 1 and not self._takes_several:
            text = "\n\n".join(str(message.get("content") or "") for message in messages[:run])
            messages = [{**messages[0], "content": text}, *messages[run:]]
        fitted = replace(conversation, messages=messages)
        self._check(fitted, conversation)
        return fitted

    def _renamed(self, place: str, message: Message) -> Message:
        as_system = place.replace("developer", "system")
        return {**message, "role": "system"} if place not in self._known and as_system in self._known else message

    def _check(self, fitted: Conversation, given: Conversation) -> None:
        unsure = {
            index: _mark(index)
            for index, (place, message) in enumerate(_placed(fitted.messages))
            if place not in self._known and str(message.get("content") or "").strip()
        }
        if not unsure:
            return
        marked = [
            {**message, "content": unsure[index]} if index in unsure else message
            for index, message in enumerate(fitted.messages)
        ]
        prompt = self._template.render_conversation(replace(fitted, messages=marked)).casefold()
        for index, mark in unsure.items():
            if mark not in prompt:
                role = fitted.messages[index]["role"]
                raise bad_request(
                    f"The model's chat template leaves out this message of role '{role}'.",
                    # Leading messages may have been merged into one, which shifts the index.
                    given.path(index + len(given.messages) - len(fitted.messages), "role"),
                )

    def _renders(self, probes: Sequence[Sequence[Message]]) -> bool:
        """Return whether the template accepts some of the probes, and renders the marks of all that it accepts."""
        found = []
        for messages in probes:
            marks = [_mark(n) for n in range(2) if any(message["content"] == _mark(n) for message in messages)]
            for tools in (None, [{"type": "function", "function": _TOOL}]):
                try:
                    prompt = self._template.render_conversation(
                        Conversation(messages, True, False, {}, tools, False, "messages")
                    )
                except ApiError:
                    continue
                self.prompts.append(prompt)
                text = prompt.casefold()
                found.append(all(mark in text for mark in marks))
        return bool(found) and all(found)


def _mark(number: int) -> str:
    return f"qzmark{number}zq"


def _marked(role: str, number: int = 0) -> dict[str, Any]:
    return {"role": role, "content": _mark(number)}


def _placed(messages: Sequence[Message]) -> Iterator[tuple[str, Message]]:
    """Yield each message with its role. A role of INSTRUCTIONS after other roles gets the prefix LATER."""
    leading = True
    for message in messages:
        role = message["role"]
        leading = leading and role in INSTRUCTIONS
        yield (LATER + role if role in INSTRUCTIONS and not leading else role), message


_RESULT = _marked("tool") | {"tool_call_id": "a1b2c3d4e", "name": "probe"}
_PROBES: dict[str, list[list[Message]]] = {
    "user": [[_marked("user")], [_marked("user"), _ANSWER, _USER], [_USER, _ANSWER, _marked("user")]],
    "assistant": [[_USER, _marked("assistant")], [_USER, _marked("assistant"), _USER]],
    "tool": [[_USER, _CALLS, _RESULT], [_USER, _CALLS, _RESULT, _ANSWER, _USER]],
    "function": [
        [
            _USER,
            {"role": "assistant", "content": "", "function_call": _CALL},
            _marked("function") | {"name": "probe"},
        ]
    ],
    **{role: [[_marked(role), _USER], [_marked(role), _USER, _ANSWER, _USER]] for role in INSTRUCTIONS},
    **{LATER + role: [[_USER, _marked(role)], [_USER, _ANSWER, _marked(role), _USER]] for role in INSTRUCTIONS},
}
