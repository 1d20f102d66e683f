"""The chat templates of one model. Each request uses the one that fits it."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import bad_request
from .chat_tokens import ChatTokens
from .conversation import Conversation
from .template_files import DEFAULT

# The template for requests with tools, and the one for requests with documents, if the model has them. transformers
# also chooses `tool_use` by itself.
TOOL_USE, RAG = "tool_use", "rag"


@dataclass(frozen=True)
class NamedChats:
    """Turns conversations into prompts by several templates. by_name: at least one."""

    by_name: Mapping[str, ChatTokens]

    @property
    def default(self) -> ChatTokens | None:
        return self.by_name.get(DEFAULT)

    def encode(self, conversation: Conversation) -> list[int]:
        """Render a conversation and tokenize it. Raises ApiError when no template takes it."""
        names = [TOOL_USE] if conversation.tools else []
        names += [RAG] if conversation.documents else []
        chat = next((self.by_name[name] for name in (*names, DEFAULT) if name in self.by_name), None)
        if chat is None:
            kinds = " or ".join(self.by_name)
            raise bad_request(f"The model has a chat template only for {kinds}.", conversation.param)
        return chat.encode(conversation)
