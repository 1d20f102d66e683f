"""Thoughts of gpt-oss, in OpenAI's Harmony format: each message has a channel, and analysis is the thoughts.

After the prompt, a model writes for example

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

A message to a function has `to=functions.NAME` in its header, before or after the channel. It is passed on as it is,
with its header, for the reader of calls. Source: https://github.com/openai/harmony, docs/format.md.
"""

from typing import Any

from ..reading.lark import LarkSpelling
from ..reading.parts import Part, Thought
from .thought_reader import Place, ThoughtReader, any_until

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_STOPS = (*ENDS, START, CHANNEL)  # a model may forget the end of a message
TO_FUNCTION = "to=functions."
_LONGEST_HEADER = 256


class HarmonyThoughts(ThoughtReader):
    """Reads the messages of the analysis channel as thoughts, and those of the other channels as content."""

    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._thoughts = False  # whether the message is thoughts
        self._in_body = place == "after"
        if place == "after":
            self._state = self._body

    @staticmethod
    def writes(template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    @staticmethod
    def place(prompt: str, continues: bool) -> Place:
        return "after" if continues else "before"

    @staticmethod
    def thoughts_rules(place: Place, budget: int | None, lark: LarkSpelling) -> str:
        if place == "after":
            return 'thoughts: ""'
        end = lark.token("<|end|>")
        if end is None:
            raise ValueError("<|end|> is not a token of this model")
        begin, finish = (lark.spell(text) for text in (f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant"))
        return f"thoughts: ({begin} any_thought {finish})?\n{any_until(end, budget)}"

    @staticmethod
    def free_rules(place: Place, lark: LarkSpelling) -> str:
        """Forbid the analysis channel for the first message after the thoughts."""
        channel, message, constrain = (lark.spell(text) for text in (CHANNEL, MESSAGE, CONSTRAIN))
        return (
            f"start: thoughts rest\nrest: TO? {channel} OTHER ({constrain} KIND)? {message} any\n"
            "TO: / to=[^<]{1,128}/\nOTHER: /(final|commentary)[^<]{0,128}/\nKIND: /[a-z]{1,16} ?/\nany: <[*]>*"
        )

    @staticmethod
    def answer_opening() -> str:
        return f"{CHANNEL}final{MESSAGE}"

    @staticmethod
    def restored(message: dict[str, Any], thoughts: str) -> dict[str, Any]:
        """Return a message with its thoughts for the template. Of a message with calls, the template writes either the
        content or the thoughts, so its content follows its thoughts."""
        content = message.get("content")
        if not message.get("tool_calls") or not content:
            return {**message, "thinking": thoughts}
        return {**message, "thinking": f"{thoughts}\n\n{content}", "content": ""}

    def plain(self, text: str) -> Part | None:
        if self._rest or not self._in_body or "<" in text or not text:
            return None
        return Thought(text) if self._thoughts else text

    def _at_start(self) -> bool:
        """The state before the header of a message, whose `<|start|>assistant` the prompt may have."""
        text, at = self._rest, self._rest.find(MESSAGE)
        header = text[:at] if at >= 0 else text[: len(text) - self._held(text, CHANNEL, CONSTRAIN, MESSAGE)]
        if len(header) > _LONGEST_HEADER or not _may_be_header(header):
            return self._go_no_header()
        if at < 0:
            if not self._ended:
                return False
            if not text.startswith((START, CHANNEL)):
                return self._go_no_header()
            self._drop(len(text))  # the text breaks off in a header
            return False
        if TO_FUNCTION in header:
            self._add_content(self._take(at + len(MESSAGE)))
            return self._go(self._call)
        self._drop(at + len(MESSAGE))
        return self._go_body(thoughts=_channel_of(header) == "analysis")

    def _go_no_header(self) -> bool:
        """Treat text that looked like a header as content."""
        marker = next((marker for marker in (START, CHANNEL) if self._rest.startswith(marker)), "")
        self._add_content(self._take(len(marker)))
        return self._go_body(thoughts=False)

    def _go_body(self, thoughts: bool) -> bool:
        self._thoughts = self.thinking = thoughts
        self._in_body = True
        return self._go(self._body)

    def _body(self) -> bool:
        """The state within a message."""
        at, marker = self._next_stop()
        if self._thoughts:
            self._add_thought(self._take(at))
        else:
            self._add_content(self._take(at))
        if not marker:
            return False
        self.thinking = self._in_body = False
        if marker in ENDS:
            self._drop(len(marker))
        return self._go(self._between)

    def _call(self) -> bool:
        """The state within a message to a function."""
        at, marker = self._next_stop()
        self._add_content(self._take(at + (len(marker) if marker in ENDS else 0)))
        return bool(marker) and self._go(self._between)

    def _next_stop(self) -> tuple[int, str]:
        """Return how many characters of the rest are within the message, and the marker after them, if it is there."""
        text = self._rest
        if "<" not in text:
            return len(text), ""
        return min(
            ((at, marker) for marker in _STOPS if (at := text.find(marker)) >= 0),
            default=(len(text) - self._held(text, *_STOPS), ""),
        )

    def _between(self) -> bool:
        """The state between two messages."""
        if self._rest.startswith((START, CHANNEL)):
            return self._go(self._at_start)
        if self._may_become(START, CHANNEL):
            return False
        return bool(self._rest) and self._go_body(thoughts=False)


def _may_be_header(text: str) -> bool:
    """Return whether a text may be the beginning of a header, or a whole header up to the marker of its message."""
    before, _, behind = text.removeprefix(START).partition(CHANNEL)
    if "<" in before or "<" in behind.replace(CONSTRAIN, "", 1):
        return False
    role = before.lstrip()
    recipient = role.removeprefix("assistant").lstrip()
    return "assistant".startswith(role) or "to=".startswith(recipient) or recipient.startswith("to=")


def _channel_of(header: str) -> str:
    """Return the channel that a header names. It is empty if a model has left out the required channel."""
    _, _, behind = header.partition(CHANNEL)
    return (behind.split(maxsplit=1) or [""])[0].partition("<")[0]
