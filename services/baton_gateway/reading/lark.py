"""Writes texts that contain control tokens in llguidance's grammar language, a dialect of Lark."""

import json
from collections.abc import Mapping

from .text_finder import TextFinder


class LarkSpelling:
    """Spells texts for the tokenizer of one model.

    llguidance matches control tokens by their id only, never by their text. It also treats every added token whose name
    is in angle brackets as a control token (toktrie_hf_tokenizers).
    """

    def __init__(self, tokens: Mapping[str, tuple[int, bool]]) -> None:
        """tokens: the added tokens, each with its id and whether it is flagged as special."""
        self._ids = {
            token: id
            for token, (id, special) in tokens.items()
            if token and (special or (token.startswith("<") and token.endswith(">")))
        }
        self._finder = TextFinder(self._ids)

    def token(self, text: str) -> int | None:
        """Return the id of the control token with this text; None if there is none."""
        return self._ids.get(text)

    def cut(self, text: str) -> tuple[str, str]:
        """Cut a text before the first control token in it. The second part is empty if there is none."""
        found = next(self._finder.find_all(text), None)
        at = len(text) if found is None else found.start()
        return text[:at], text[at:]

    def spell(self, text: str) -> str:
        """Return symbols that match exactly this text, for the body of a rule."""
        symbols, at = [], 0
        for match in self._finder.find_all(text):
            symbols += [*_literal(text[at : match.start()]), f"<[{self._ids[match[0]]}]>"]
            at = match.end()
        return " ".join([*symbols, *_literal(text[at:])]) or '""'


def _literal(text: str) -> list[str]:
    return [json.dumps(text)] if text else []
