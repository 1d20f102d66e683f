"""Thoughts between two markers."""

from typing import ClassVar

from ..reading.lark import LarkSpelling
from ..reading.parts import Part, Thought
from .thought_reader import Place, ThoughtReader, any_until


class TaggedThoughts(ThoughtReader):
    """Reads thoughts between a marker and its counterpart.

    Line ends beside the markers belong to them: templates write them, too, and strip them from thoughts and content.
    """

    begin: ClassVar[str]
    finish: ClassVar[str]
    # Whether thoughts can begin anywhere. Otherwise thoughts come only at the beginning of a text, since an answer may
    # mention the marker.
    anywhere: ClassVar[bool] = False
    # Other spellings of `begin` and `finish`, each with the same first character.
    other_begins: ClassVar[tuple[str, ...]] = ()
    other_finishes: ClassVar[tuple[str, ...]] = ()
    # Characters beside the markers that belong to them.
    space: ClassVar[str] = "\n"
    # Markers of calls, which end thoughts even if the model forgets to do so.
    calls: ClassVar[tuple[str, ...]] = ()

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._in_thoughts = self._in_answer = False
        self._spaces = 0  # characters of `space` that begin the rest, held back as a marker may follow
        self._state = {"before": self._at_start, "inside": self._begun, "after": self._answer}[place]

    @classmethod
    def place(cls, prompt: str, continues: bool) -> Place:
        if continues:
            begun, finished = prompt.rfind(cls.begin), prompt.rfind(cls.finish)
            return "inside" if begun > finished else "after" if prompt.strip() else "before"
        prompt = prompt.rstrip()
        return "inside" if prompt.endswith(cls.begin) else "after" if prompt.endswith(cls.finish) else "before"

    @classmethod
    def thoughts_rules(cls, place: Place, budget: int | None, lark: LarkSpelling) -> str:
        if place == "after":
            return 'thoughts: ""'
        begin, finish = lark.spell(cls.begin), lark.spell(cls.finish)
        rule = "thoughts: thought" if place == "inside" else f"thoughts: ({begin} thought)?"
        id = lark.token(cls.finish)
        if id is not None:
            return f"{rule}\nthought: any_thought {finish}\n{any_until(id, budget)}"
        if budget is not None:
            raise ValueError("the marker that ends thoughts is not a token of this model")
        return f"{rule}\nthought[suffix={finish}]: /(?s:.*)/"

    @classmethod
    def free_rules(cls, place: Place, lark: LarkSpelling) -> str:
        if place == "inside":
            return "start: thoughts rest\nrest: <[*]>*"
        id = lark.token(cls.begin.strip())
        if id is None:
            raise ValueError("the marker that begins thoughts is not a token of this model")
        return f"start: before thoughts rest\nbefore: <[^{id}]>?\nrest: <[^{id}]>*"

    def plain(self, text: str) -> Part | None:
        if self._rest or not text:
            return None
        if self._in_thoughts:
            return Thought(text) if self.finish[0] not in text and text[-1] not in self.space else None
        return text if self._in_answer and (not self.anywhere or self.begin[0] not in text) else None

    def _at_start(self) -> bool:
        text = self._rest.lstrip()
        begins = (self.begin, *self.other_begins)
        for begin in begins:
            if text.startswith(begin):
                self._drop(len(self._rest) - len(text) + len(begin))
                return self._go_thinking()
        if not self._ended and any(begin.startswith(text) for begin in begins):
            return False
        return self._go(self._answer)

    def _go_thinking(self) -> bool:
        self.thinking, self._in_answer = True, False
        return self._go(self._begun)

    def _begun(self) -> bool:
        """The state after the marker that begins thoughts."""
        self._drop_around()
        self._in_thoughts = bool(self._rest)
        return self._in_thoughts and self._go(self._thoughts)

    def _thoughts(self) -> bool:
        ends = (self.finish, *self.other_finishes, *self.calls)
        rest, known = self._rest, self._spaces
        at, end = min(((at, end) for end in ends if (at := rest.find(end, known)) >= 0), default=(-1, ""))
        if at >= 0:
            self._spaces = 0
            self._add_thought(self._take(len(self._rest[:at].rstrip(self.space))))
            self._drop_around()
            self._drop(0 if end in self.calls else len(end))
            self.thinking = self._in_thoughts = False
            return self._go(self._finished)
        if self._ended:
            self._add_thought(self._take(len(self._rest)))
            return False
        self._add_thought(self._take_shown(*ends))
        return False

    def _take_shown(self, *ends: str) -> str:
        """Take the text that is not held back. Each space is looked at once, however often a model repeats it."""
        new = self._rest[self._spaces :]
        new = new[: len(new) - self._held(new, *ends)]
        shown = new.rstrip(self.space)
        taken = self._take(self._spaces + len(shown)) if shown else ""
        self._spaces = len(new) - len(shown) if shown else self._spaces + len(new)
        return taken

    def _finished(self) -> bool:
        """The state after the marker that ends thoughts."""
        self._drop_around()
        return bool(self._rest) and self._go(self._answer)

    def _drop_around(self) -> None:
        self._drop(len(self._rest) - len(self._rest.lstrip(self.space)))

    def _answer(self) -> bool:
        self._in_answer = True
        if not self.anywhere:
            self._add_content(self._take(len(self._rest)))
            return False
        if (at := self._rest.find(self.begin)) >= 0:
            self._add_content(self._take(at))
            self._drop(len(self.begin))
            return self._go_thinking()
        self._add_content(self._take(len(self._rest) - self._held(self._rest, self.begin)))
        return False
