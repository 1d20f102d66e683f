"""The formats in which families of models write tool calls, and how a chat template reveals its format."""

import re
from typing import Literal

from .tool_parser import NAME, ToolParser

ToolFormat = Literal["auto", "hermes", "mistral", "llama3_json", "none"]

# A name before its arguments. From Mistral's tokenizer v11 on, an id and a marker may stand between the two.
_NAMED = re.compile(rf"({NAME})(?:\[CALL_ID\][a-zA-Z0-9]{{0,64}})?(?:\[ARGS\])?")
_MAYBE_NAMED = re.compile(r"[a-zA-Z0-9_.\-\[\]]{0,160}")


class _MarkedParser(ToolParser):
    """Reads calls that begin with a marker anywhere in the text."""

    def _at_start(self) -> bool:
        return self._between()

    def _after_call(self) -> bool:
        return self._between()

    def _after_none(self) -> bool:
        """The state in which text is content until a marker comes."""
        marker = self.markers[0]
        if (at := self._rest.find(marker)) >= 0:
            self._add_content(self._take(at))
            return self._go(self._between)
        held = 0 if self._ended else _overlap(self._rest, marker)
        self._add_content(self._take(len(self._rest) - held))
        return False

    def _between(self) -> bool:
        """The state before a call or between two calls, where white space is not content."""
        marker, text = self.markers[0], self._rest.lstrip()
        if text.startswith(marker):
            self._opening = self._take(len(self._rest) - len(text) + len(marker))
            return self._go(self._opened)
        if not self._ended and marker.startswith(text):
            return False
        if not text and self.count:
            self._rest = ""
            return False
        return self._go(self._after_none)

    def _opened(self) -> bool:
        """The state behind a marker."""
        self._opening += self._take_space()
        if not self._rest:
            return self._ended and self._reject(0)
        return self._go_object() if self._rest[0] == "{" else self._reject(0)


class HermesParser(_MarkedParser):
    """Hermes, Qwen and others: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

    markers = ("<tool_call>", "</tool_call>")

    def _after_call(self) -> bool:
        end, text = self.markers[1], self._rest.lstrip()
        if text.startswith(end):
            self._take(len(self._rest) - len(text) + len(end))
        elif not self._ended and end.startswith(text):
            return False
        return self._go(self._between)


class MistralParser(_MarkedParser):
    """Mistral: [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name{…} for each call."""

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def _opened(self) -> bool:
        self._opening += self._take_space()
        if not self._rest:
            return self._ended and self._reject(0)
        if self._rest[0] == "[":
            self._opening += self._take(1)
            return self._go(self._listed)
        return self._go(self._named)

    def _listed(self) -> bool:
        """The state in which a list has its next call."""
        self._in_list = True
        return super()._opened()

    def _named(self) -> bool:
        self._in_list = False
        brace = self._rest.find("{")
        head = self._rest if brace < 0 else self._rest[:brace]
        if not self._ended and brace < 0 and _MAYBE_NAMED.fullmatch(head):
            return False
        named = _NAMED.fullmatch(head)
        if brace < 0 or named is None or named[1] not in self._names:
            return self._reject(0)
        return self._go_arguments(named[1], brace, needs_brace=False)

    def _after_call(self) -> bool:
        text = self._rest.lstrip()
        if not self._in_list or text[:1] not in ("", ",", "]"):
            return self._go(self._between)
        if not text:
            return self._ended and self._go(self._between)
        between = self._take(len(self._rest) - len(text) + 1)
        if text[0] == "]":
            return self._go(self._between)
        self._opening = between
        return self._go(self._listed)


class Llama3Parser(ToolParser):
    """Llama from 3.1 on: the whole text is {"name": …, "parameters": {…}}, or several of these separated by ;."""

    markers = ("<|python_tag|>",)

    def _at_start(self) -> bool:
        [marker] = self.markers
        self._opening += self._take_space()
        if self._rest.startswith(marker):
            self._opening += self._take(len(marker))
            return self._go(self._next)
        if not self._ended and marker.startswith(self._rest):
            return False
        return self._go(self._next)

    def _next(self) -> bool:
        self._opening += self._take_space()
        if not self._rest:
            return self._ended and self._reject(0)
        return self._go_object() if self._rest[0] == "{" else self._reject(0)

    def _after_call(self) -> bool:
        text = self._rest.lstrip()
        if not text:
            if self._ended:
                self._rest = ""
            return False
        if text[0] != ";":
            return self._go(self._after_none)
        self._opening = self._take(len(self._rest) - len(text) + 1)
        return self._go(self._next)

    def _after_none(self) -> bool:
        self._add_content(self._take(len(self._rest)))
        return False


PARSERS: dict[ToolFormat, type[ToolParser]] = {
    "hermes": HermesParser,
    "mistral": MistralParser,
    "llama3_json": Llama3Parser,
}


def find_parser(format: ToolFormat, template: str | None) -> type[ToolParser] | None:
    """Return the parser of a format. auto: the format in which the chat template writes calls."""
    if format != "auto":
        return PARSERS.get(format)
    template = template or ""
    # Qwen3-Coder writes XML between the same markers.
    if "<tool_call>" in template and "<function=" not in template:
        return HermesParser
    if "[TOOL_CALLS]" in template:
        return MistralParser
    if '"parameters"' in template and "ipython" in template:
        return Llama3Parser
    return None


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
