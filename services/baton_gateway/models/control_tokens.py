"""Keeps a request's text from becoming control tokens. With `<|im_start|>`, for example, a request could forge turns.

Control tokens are the added tokens that the tokenizer flags as special, and those that the model's configuration names
(bos, eos, …). Added tokens without the flag, such as Qwen's `<think>` and `<tool_call>`, are part of answers' text and
come back in messages. They stay tokens wherever they appear.

A control token in a prompt is valid only if the template wrote all of its characters. Almost all prompts have no
invalid ones, and the model's tokenizer encodes these prompts as transformers does. All other prompts are encoded by a
twin of the tokenizer, whose only difference is that its control tokens have secret names that no request can guess.
The template's control tokens are renamed in the prompt, and the twin encodes the whole prompt. A control token that
the request spells is then ordinary text, and is merged with its neighbours by the same rules.
"""

import re
import secrets
from collections.abc import Collection
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from ..reading.text_finder import TextFinder
from .template_text import TemplateText

_OWN_RUN = re.compile(rb"\x01+")
_NAME_END = "\U0010fffd"


class ControlTokens:
    """Finds control tokens that come from the request, and encodes prompts without them. Safe to use in threads."""

    def __init__(self, tokenizer: Tokenizer, more: Collection[int] = ()) -> None:
        """tokenizer: it must not be changed afterwards. more: ids of control tokens that may lack the special flag."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: id for id, token in added.items() if token.special or id in more}
        searched = [token for token in added.values() if _is_literal(token) or token.content in self._ids]
        # The tokenizer, too, takes the token that begins first in the text, and the longest of those that begin there.
        self._finder = TextFinder(token.content for token in searched)
        self._single_words = {token.content for token in searched if token.single_word}
        made_by_model = {token for token, id in self._ids.items() if _model_makes(tokenizer, token, id)}
        normalized = {token.content for token in added.values() if not _is_literal(token) and tokenizer.normalizer}
        # Tokens that the tokenizer may also make from characters other than those of their name.
        self._other_spellings = {id: token for token, id in self._ids.items() if token in made_by_model | normalized}
        self._unknown = _unknown_token(tokenizer) if self._other_spellings else None
        secret = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(8))
        self._secret_names = {token: f"{secret}{n}{_NAME_END}" for n, token in enumerate(self._ids)}
        self._twin, self._real_ids = _twin(tokenizer, self._secret_names, made_by_model, secret)

    def spelled(self, text: TemplateText) -> str | None:
        """Return a control token that the request's part of a prompt spells; None if it spells none."""
        plain = text.plain
        for match in self._finder.find_all(plain):
            if self._is_control(match) and not text.has_own(*match.span()):
                return match[0]
        return self._spelled_otherwise(text) if self._other_spellings else None

    def encode(self, text: TemplateText, add_special_tokens: bool) -> list[int]:
        """Encode a prompt in which the control tokens are those that the template wrote."""
        named = self._with_secret_names(text)
        ids = self._twin.encode_batch_fast([named], add_special_tokens=add_special_tokens)[0].ids
        real_ids = self._real_ids
        return [real_ids.get(id, id) for id in ids]

    def _is_control(self, match: re.Match[str]) -> bool:
        if match[0] not in self._ids:
            return False
        if match[0] not in self._single_words:
            return True
        beside = match.string[max(match.start() - 1, 0) : match.start()] + match.string[match.end() : match.end() + 1]
        return not re.search(r"\w", beside)

    def _spelled_otherwise(self, text: TemplateText) -> str | None:
        encoding = self._tokenizer.encode_batch([text.plain], add_special_tokens=False)[0]
        for index, id in enumerate(encoding.ids):
            token = self._other_spellings.get(id)
            span = encoding.token_to_chars(index) if token is not None else None
            if token is None or span is None:
                continue
            found = text[slice(*span)].strip()
            # A character outside the vocabulary becomes the unknown token. It does not spell that token's name.
            if not found.has_own(0, len(found)) and (token != self._unknown or found == token):
                return token
        return None

    def _with_secret_names(self, text: TemplateText) -> str:
        plain, at = text.plain, 0
        pieces: list[str] = []
        for run in _OWN_RUN.finditer(text.own):
            for match in self._finder.find_all(plain, *run.span()):
                if self._is_control(match):
                    pieces += (plain[at : match.start()], self._secret_names[match[0]])
                    at = match.end()
        return "".join((*pieces, plain[at:]))


def _is_literal(token: AddedToken) -> bool:
    """Return whether the tokenizer looks for a token before it normalizes the text."""
    return not token.normalized


def _model_makes(tokenizer: Tokenizer, token: str, id: int) -> bool:
    """Return whether the model alone turns the name of a token into that token, as Unigram does with its vocabulary."""
    try:
        return any(piece.id == id for piece in tokenizer.model.tokenize(token))
    except Exception:  # the library raises nothing narrower where a model has no unknown token
        return False


def _unknown_token(tokenizer: Tokenizer) -> str | None:
    model = msgspec.json.decode(tokenizer.to_str())["model"]
    if model["type"] == "Unigram":
        found = None if model["unk_id"] is None else model["vocab"][model["unk_id"]][0]
    else:
        found = model.get("unk_token")
    return None if found is None else str(found)


def _twin(
    tokenizer: Tokenizer, names: dict[str, str], made_by_model: Collection[str], secret: str
) -> tuple[Tokenizer, dict[int, int]]:
    """Return a tokenizer with other names for control tokens, and the real id of each id of its added tokens."""
    added = tokenizer.get_added_tokens_decoder()
    twin = Tokenizer(_renamed_model(tokenizer, names) if made_by_model else tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(twin, part, value)
    # Added tokens get the next free ids, which must not be ids of the original tokenizer. Placeholders use those up.
    free = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    twin.add_tokens([f"{secret}free{n}{_NAME_END}" for n in range(free - twin.get_vocab_size())])
    twin.add_tokens([_renamed(token, names.get(token.content)) for _, token in sorted(added.items())])
    real_ids = {}
    for id, token in added.items():
        twin_id = twin.token_to_id(names.get(token.content, token.content))
        assert twin_id is not None
        real_ids[twin_id] = id
    return twin, real_ids


def _renamed(token: AddedToken, name: str | None) -> AddedToken:
    if name is None:
        return token
    # Its secret name appears only where this module wrote it, so `normalized` and `single_word` do not matter.
    return AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=True)


def _renamed_model(tokenizer: Tokenizer, names: dict[str, str]) -> Any:
    """Return the tokenizer's model with the control tokens in its vocabulary renamed."""
    spec = msgspec.json.decode(tokenizer.to_str())
    model = spec["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): id for piece, id in model["vocab"].items()}
        model["unk_token"] = names.get(model.get("unk_token"), model.get("unk_token"))
    if "merges" in model:
        pairs = [merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    bare = {"version": spec["version"], "added_tokens": [], "model": model}
    return Tokenizer.from_str(msgspec.json.encode(bare).decode()).model
