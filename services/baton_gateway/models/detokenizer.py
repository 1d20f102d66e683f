"""Turns token ids into text, a few tokens at a time.

For every detokenizer, the joined pieces that `push` and `flush` return equal `Tokenizer.decode` of all the ids. No
piece ends inside a character.
"""

import codecs
import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# A longer run of replacement characters is not the beginning of a character. If it were held back, the whole run would
# be decoded again for each token.
_LONGEST_HELD = REPLACEMENT * 256


class Detokenizer(Protocol):
    """Produces the text of one growing sequence of tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens; return the text that can no longer change."""
        ...

    def flush(self) -> str:
        """Return the rest of the text, since no more tokens will come."""
        ...


class Pieces(Protocol):
    """The bytes of single tokens, and a detokenizer for sequences of them."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text. A special token adds the bytes of its name."""
        ...

    def detokenizer(self, skip_special_tokens: bool, kept: frozenset[int] = frozenset()) -> Detokenizer:
        """kept: special tokens that are not skipped."""
        ...


def read_pieces(tokenizer: Tokenizer) -> Pieces:
    """Choose the detokenizer that fits the tokenizer's decoder."""
    decoder = msgspec.json.decode(tokenizer.to_str())["decoder"] or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return ByteLevelPieces(tokenizer)
    if (strip := _byte_fallback_strip(steps)) is not None:
        return ByteFallbackPieces(tokenizer, strip)
    return WindowPieces(tokenizer)


def _byte_fallback_strip(steps: list[dict[str, Any]]) -> int | None:
    """Return how many leading spaces a SentencePiece-like decoder strips, None for any other decoder."""
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if steps[:3] != [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]:
        return None
    match steps[3:]:
        case []:
            return 0
        case [{"type": "Strip", "content": " ", "start": int(start), "stop": 0}]:
            return start
    return None


def _tokens(tokenizer: Tokenizer) -> list[str | None]:
    """Return a list with the token of each id, None for unused ids."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        tokens[token_id] = added.content
    return tokens


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return {token_id for token_id, added in tokenizer.get_added_tokens_decoder().items() if added.special}


class ByteLevelPieces:
    """Tokens of byte-level BPE: each stands for some bytes, and the text is their UTF-8 decoding."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        alphabet = _byte_level_alphabet()
        self._pieces = [_byte_level_bytes(token or "", alphabet) for token in _tokens(tokenizer)]
        self._special = _special_ids(tokenizer)
        self._pieces_by_kept: dict[frozenset[int], list[bytes]] = {}  # by the special tokens that are not skipped

    def bytes_of(self, token_id: int) -> bytes:
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def detokenizer(self, skip_special_tokens: bool, kept: frozenset[int] = frozenset()) -> Detokenizer:
        if not skip_special_tokens:
            return _ByteLevelDetokenizer(self._pieces)
        if kept not in self._pieces_by_kept:
            self._pieces_by_kept[kept] = list(self._pieces)
            for token_id in self._special - kept:
                self._pieces_by_kept[kept][token_id] = b""
        return _ByteLevelDetokenizer(self._pieces_by_kept[kept])


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's map from characters to bytes (see its encoder.py). Printable bytes keep their characters."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


class _ByteLevelDetokenizer:
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        try:
            data = b"".join([pieces[token_id] for token_id in token_ids])
        except IndexError:  # a padded vocabulary has ids that no token has
            data = b"".join([pieces[token_id] for token_id in token_ids if token_id < len(pieces)])
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteFallbackPieces:
    """Tokens of SentencePiece with byte fallback: text with ▁ for space, or single bytes written <0xNN>."""

    def __init__(self, tokenizer: Tokenizer, strip: int) -> None:
        """strip: spaces taken off the beginning of the text."""
        self._strip = strip
        self._pieces = [_byte_fallback_piece(token or "") for token in _tokens(tokenizer)]
        self._special = _special_ids(tokenizer)

    def bytes_of(self, token_id: int) -> bytes:
        piece = self._pieces[token_id] if token_id < len(self._pieces) else ""
        return piece.encode() if isinstance(piece, str) else bytes([piece])

    def detokenizer(self, skip_special_tokens: bool, kept: frozenset[int] = frozenset()) -> Detokenizer:
        skipped = self._special - kept if skip_special_tokens else set()
        return _ByteFallbackDetokenizer(self._pieces, skipped, self._strip)


def _byte_fallback_piece(token: str) -> str | int:
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return int(match[1], 16)
    return token.replace("▁", " ")


class _ByteFallbackDetokenizer:
    """Holds back a run of byte tokens until it ends: one invalid byte makes all of it replacement characters."""

    def __init__(self, pieces: list[str | int], skipped: set[int], strip: int) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._strip = strip
        self._run = bytearray()

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            if token_id in self._skipped or token_id >= len(self._pieces):
                continue
            piece = self._pieces[token_id]
            if isinstance(piece, int):
                self._run.append(piece)
            else:
                text += self._end_run() + piece
        return self._stripped(text)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            self._strip -= 1
            text = text[1:]
        return text


class WindowPieces:
    """Tokens of any other tokenizer, detokenized by its own decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def detokenizer(self, skip_special_tokens: bool, kept: frozenset[int] = frozenset()) -> Detokenizer:
        return _WindowDetokenizer(self._tokenizer, self._special - kept if skip_special_tokens else set())


class _WindowDetokenizer:
    """Decodes new tokens together with earlier tokens whose text was returned: the decoder may need that context.

    This is the two-offset method of Hugging Face's text-generation-inference.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: set[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._shown_ids = 0
        self._shown = ""

    def push(self, token_ids: Sequence[int]) -> str:
        self._window += [token_id for token_id in token_ids if token_id not in self._skipped]
        text = self._decode(self._window)
        held = text.endswith(REPLACEMENT) and not text.endswith(_LONGEST_HELD)
        return "" if held else self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new:
            self._window = self._window[self._shown_ids :]
            self._shown_ids = len(self._window)
            self._shown = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
