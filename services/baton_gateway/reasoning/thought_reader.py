"""The base class of the readers of thoughts."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ..reading.lark import LarkSpelling
from ..reading.parts import Part
from ..reading.text_reader import TextReader

# Where the model's text begins: before possible thoughts, inside thoughts that the prompt has begun, or after the
# thoughts.
Place = Literal["before", "inside", "after"]


class ThoughtReader(TextReader):
    """Reads the thoughts of one choice. The text after them is content, in which there may be calls."""

    # Begin and end thoughts. The detokenizer must keep them in the text even if they are special tokens.
    markers: ClassVar[tuple[str, ...]]

    def __init__(self, place: Place) -> None:
        self.thinking = place == "inside"
        super().__init__()

    @abstractmethod
    def plain(self, text: str) -> Part | None:
        """Read text that is wholly a thought or wholly content. None = `push` must read it."""

    @staticmethod
    @abstractmethod
    def writes(template: str) -> bool:
        """Return whether models with this chat template write thoughts in this format."""

    @staticmethod
    @abstractmethod
    def place(prompt: str, continues: bool) -> Place:
        """Return where the text of the model begins.

        prompt: the end of the prompt, or if it continues a message of the assistant, the content of that message.
        """

    @staticmethod
    @abstractmethod
    def thoughts_rules(place: Place, budget: int | None, lark: LarkSpelling) -> str:
        """Return Lark with a rule `thoughts` that matches the thoughts with their markers.

        budget: the most tokens that may stand between the markers; None = any number. Raises ValueError when the
        tokenizer has no tokens for the markers, so that tokens cannot be counted.
        """

    @staticmethod
    @abstractmethod
    def free_rules(place: Place, lark: LarkSpelling) -> str:
        """Return Lark that matches `thoughts` and whatever follows them, or stands in their place.

        Raises ValueError as `thoughts_rules` does.
        """

    @staticmethod
    def answer_opening() -> str:
        """Return the text between the thoughts and an answer that is no call."""
        return ""

    @staticmethod
    def restored(message: dict[str, Any], thoughts: str) -> dict[str, Any]:
        """Return a message of an earlier turn with its thoughts where chat templates expect them."""
        return {**message, "reasoning_content": thoughts, "reasoning": thoughts}


def any_until(token: int, budget: int | None) -> str:
    """Return Lark with a rule `any_thought` that matches at most `budget` tokens other than one token."""
    if budget == 0:
        return 'any_thought: ""'
    return f"any_thought: <[^{token}]>" + ("*" if budget is None else f"{{0,{budget}}}")


def thoughts_of(message: Mapping[str, Any]) -> str | None:
    """Return the thoughts in a message of an earlier turn, which clients give in one of two fields."""
    for field in ("reasoning_content", "reasoning"):
        if isinstance(message.get(field), str) and message[field]:
            return str(message[field])
    return None
