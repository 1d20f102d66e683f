"""The tokens that are found in a text before the tokenizer's model sees it: their ids and flags."""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken

from .errors import TokenizerError
from .model_folder import ModelFolder
from .special_names import content

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MOST_ID = 1 << 24


class AddedTokens:
    """A vocabulary whose added tokens are collected from the files of a model folder, in the order of transformers."""

    def __init__(self, folder: ModelFolder, ids: dict[str, int]) -> None:
        """ids: the id of each token of the model, to which the added tokens are added."""
        self.ids = ids
        self._folder = folder
        self._tokens = {id: token for token, id in ids.items()}
        self._added: dict[int, AddedToken] = {}

    def collect(self, defaults: Mapping[int, AddedToken], names: Iterable[str]) -> None:
        """Take the tokens of tokenizer_config.json and added_tokens.json, then those of `defaults` whose id and text
        are still free, then special tokens without an id of their own: `names`, and those in lists of the files.

        Raises TokenizerError when one text is to have two ids.
        """
        listed = self._listed()
        taken = {token.content for token in listed.values()}
        kept = {id: token for id, token in defaults.items() if id not in listed and token.content not in taken}
        for id, token in sorted({**kept, **listed}.items()):
            self._place(id, token)
        for text in dict.fromkeys((*names, *self._unplaced())):
            self._make_special(text)

    def in_order(self) -> list[AddedToken]:
        """Return the added tokens by their ids. All of them are in `ids`, so a tokenizer keeps these ids."""
        return [token for _, token in sorted(self._added.items())]

    def _listed(self) -> dict[int, AddedToken]:
        listed: dict[int, AddedToken] = {}
        for text, id in self._folder.fields("added_tokens.json").items():
            listed[self._id(id, "added_tokens.json")] = AddedToken(text, normalized=False)
        described = self._folder.settings().get("added_tokens_decoder") or {}
        if not isinstance(described, dict):
            raise self._error("tokenizer_config.json", "added_tokens_decoder must be an object")
        for id, token in described.items():
            listed[self._id(id, "tokenizer_config.json")] = self._described(token)
        return listed

    def _id(self, id: Any, file: str) -> int:
        try:
            number = int(id)
        except (TypeError, ValueError, OverflowError):
            number = -1
        if not 0 <= number < _MOST_ID:
            raise self._error(file, f"{id!r} is not a token id")
        return number

    def _described(self, token: Any) -> AddedToken:
        text = content(token)
        if text is None:
            raise self._error("tokenizer_config.json", "a token in added_tokens_decoder has no content")
        flags = {flag: token[flag] for flag in _FLAGS if isinstance(token, dict) and isinstance(token.get(flag), bool)}
        return AddedToken(text, **flags)

    def _unplaced(self) -> Iterable[str]:
        """Yield the special tokens of the lists that have no ids, and no roles."""
        for fields in (self._folder.fields("special_tokens_map.json"), self._folder.settings()):
            for field in ("additional_special_tokens", "extra_special_tokens"):
                tokens = fields.get(field) or []
                tokens = tokens.values() if isinstance(tokens, dict) else tokens
                yield from (text for token in tokens if (text := content(token)) is not None)

    def _place(self, id: int, token: AddedToken) -> None:
        present = self.ids.get(token.content, id)
        if present != id:
            raise self._error("tokenizer_config.json", f"{token.content!r} has the ids {present} and {id}")
        # Some models give a token of the vocabulary, usually one set aside for this, another text.
        if (renamed := self._tokens.get(id)) is not None:
            del self.ids[renamed]
        self.ids[token.content] = id
        self._tokens[id] = token.content
        self._added[id] = token

    def _make_special(self, text: str) -> None:
        id = self.ids.get(text)
        if id is None:
            id = max(self._tokens, default=-1) + 1
        if id in self._added:
            self._added[id].special = True
        else:
            self._place(id, AddedToken(text, special=True, normalized=False))

    def _error(self, file: str, message: str) -> TokenizerError:
        return TokenizerError(f"{self._folder.path / file}: {message}")
