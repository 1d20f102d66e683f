"""Turns a conversation into the token ids of a prompt."""

from dataclasses import dataclass

from ..errors import ApiError, bad_request
from .chat_template import ChatTemplate
from .control_tokens import ControlTokens
from .conversation import Conversation, strings
from .models_file import SpecialTokensPolicy
from .template_roles import TemplateRoles
from .tokenizer import ModelTokenizer


@dataclass(frozen=True)
class ChatTokens:
    """Turns conversations into prompts of one model. It is immutable, so threads may share it."""

    template: ChatTemplate
    roles: TemplateRoles
    tokenizer: ModelTokenizer
    control: ControlTokens
    policy: SpecialTokensPolicy

    def __post_init__(self) -> None:
        """Raises ValueError when the template's own control tokens cannot be told from the request's."""
        if self.policy == "tokens":
            return
        for prompt in self.roles.prompts:
            if (token := self.control.spelled(prompt)) is not None:
                raise ValueError(
                    f"the chat template builds {token!r} in a way that cannot be followed, so clients' text could not "
                    "be told from the template's; special_tokens_in_content: tokens serves the model without protection"
                )

    def encode(self, conversation: Conversation) -> list[int]:
        """Render a conversation and tokenize it.

        Raises ApiError when the template refuses the conversation or leaves out a message, and when the policy is
        "reject" and the conversation spells a control token.
        """
        fitted = self.roles.fit(conversation)
        prompt = self.template.render_conversation(fitted)
        special = conversation.add_special_tokens
        if self.policy == "tokens" or (token := self.control.spelled(prompt)) is None:
            return self.tokenizer.encode_now(prompt, special)
        if self.policy == "reject":
            raise _spelling_error(token, conversation)
        return self.control.encode(prompt, special)


def _spelling_error(token: str, conversation: Conversation) -> ApiError:
    for index, message in enumerate(conversation.messages):
        for name, value in message.items():
            if any(token in text for text in strings(value)):
                return bad_request(f"The message spells the special token {token!r}.", conversation.path(index, name))
    for param, value in (
        ("tools", conversation.tools),
        ("chat_template_kwargs", conversation.variables),
        ("documents", conversation.documents),
    ):
        if any(token in text for text in strings(value)):
            return bad_request(f"'{param}' spells the special token {token!r}.", param)
    return bad_request(f"The conversation spells the special token {token!r}.", conversation.param)
