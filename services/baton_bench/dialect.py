"""The forms of requests: token ids, text or chats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Form = Literal["ids", "text", "chat"]

# Short and common, so that most vocabularies have a token for each of them with the space before it.
_TEXT = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into them
can only other time new some could these two may first then do any like my now over such our man me even most made after
also did many off before must well back through years where much your way down should because long each just those
people too good year world day
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Dialect:
    """The form of requests that an endpoint accepts.

    form: prompts as token ids, text or chats. exact: it takes what vLLM has added to the API, so that answers have the
    asked length and chunks say how many tokens they have. token_ids: answers tell theirs, so that a conversation goes
    on with the very same tokens.
    """

    model: str
    form: Form
    exact: bool
    token_ids: bool
    temperature: float

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.form == "chat" else "/v1/completions"

    def body(self, conversation: "Conversation", outputs: int) -> bytes:
        """Return the request for the next turn."""
        options: dict[str, Any] = {"include_usage": True}
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": outputs,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": options,
        }
        if self.exact:
            options["continuous_usage_stats"] = True
            fields["ignore_eos"] = True
        if self.token_ids:
            fields["return_token_ids"] = True
        return msgspec.json.encode({**fields, **conversation.prompt})


class Conversation:
    """The conversation so far, in the form of a dialect."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._ids: list[int] = []
        self._texts: list[str] = []  # texts of the client and of the server, alternating

    @property
    def tokens(self) -> int:
        """Length of the prompt in tokens; approximate for text."""
        return len(self._ids)

    @property
    def prompt(self) -> dict[str, Any]:
        """The field of the request that holds the prompt: prompt or messages."""
        if self._form == "ids":
            return {"prompt": self._ids}
        if self._form == "text":
            return {"prompt": " ".join(self._texts)}
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(self._texts)]}

    def say(self, tokens: Sequence[int]) -> None:
        """Add what a turn brings. As text it has a word for each token, so that equal tokens are equal text."""
        self._ids += tokens
        if self._form != "ids":
            self._texts.append(" ".join(_WORDS[token % len(_WORDS)] for token in tokens))

    def hear(self, text: str, token_ids: Sequence[int], count: int) -> None:
        """Add an answer. count: its tokens, which have no ids when it is text."""
        self._ids += token_ids if self._form == "ids" else [0] * count
        self._texts.append(text)
