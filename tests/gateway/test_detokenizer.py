"""Incremental detokenization equals the tokenizer's own decoding, however tokens come."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from baton_gateway.models.detokenizer import REPLACEMENT, ByteFallbackPieces, ByteLevelPieces, WindowPieces, read_pieces

from .tiny_models import byte_fallback_tokenizer, byte_level_tokenizer, metaspace_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
LLAMA2 = byte_fallback_tokenizer(strip=True)
GEMMA = byte_fallback_tokenizer(strip=False)
METASPACE = metaspace_tokenizer()
PIECES = {id(tokenizer): read_pieces(tokenizer) for tokenizer in (BYTE_LEVEL, LLAMA2, GEMMA, METASPACE)}

chunk_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def pieces_of(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> list[str]:
    """Push ids in chunks of the given sizes, over and over."""
    detokenizer = PIECES[id(tokenizer)].detokenizer(skip)
    texts, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        texts.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*texts, detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, extra: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1 + extra), max_size=40)


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


def test_the_decoder_decides_the_kind():
    assert isinstance(read_pieces(BYTE_LEVEL), ByteLevelPieces)
    assert isinstance(read_pieces(LLAMA2), ByteFallbackPieces)
    assert isinstance(read_pieces(GEMMA), ByteFallbackPieces)
    assert isinstance(read_pieces(METASPACE), WindowPieces)


# Byte soup is where decoders differ: single-byte tokens make up most of these draws.
@given(ids=ids_of(BYTE_LEVEL, extra=30), sizes=chunk_sizes, skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_byte_level_ids(ids, sizes, skip):
    texts = pieces_of(BYTE_LEVEL, ids, sizes, skip)
    assert "".join(texts) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(data=st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xC2, 0xE4, 0xBD, 0xA0, 0xED, 0xF0, 0x9F, 0xFF]), max_size=24))
@settings(max_examples=200, deadline=None)
def test_byte_level_invalid_utf8(data):
    alphabet = {piece: token for token in range(256 + 6) if len(piece := read_bytes(token)) == 1}
    ids = [alphabet[bytes([byte])] for byte in data]
    assert "".join(pieces_of(BYTE_LEVEL, ids, [1], True)) == BYTE_LEVEL.decode(ids)


def read_bytes(token: int) -> bytes:
    return PIECES[id(BYTE_LEVEL)].bytes_of(token)


@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, LLAMA2, GEMMA, METASPACE], ids=["byte-level", "llama2", "gemma", "t5"]
)
@given(text=st.text(max_size=60), sizes=chunk_sizes)
@settings(max_examples=150, deadline=None)
def test_texts(tokenizer, text, sizes):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces_of(tokenizer, ids, sizes, True)) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [LLAMA2, GEMMA], ids=["llama2", "gemma"])
@given(data=st.data(), sizes=chunk_sizes, skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_byte_fallback_ids(tokenizer, data, sizes, skip):
    ids = data.draw(ids_of(tokenizer, extra=5))
    texts = pieces_of(tokenizer, ids, sizes, skip)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=ids_of(METASPACE), sizes=chunk_sizes, skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_other_decoders(ids, sizes, skip):
    texts = pieces_of(METASPACE, ids, sizes, skip)
    assert "".join(texts) == METASPACE.decode(ids, skip_special_tokens=skip)


def test_wordpiece_decoder():
    tokenizer = metaspace_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ids = tokenizer.encode("The quick brown fox", add_special_tokens=False).ids
    detokenizer = read_pieces(tokenizer).detokenizer(True)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (BYTE_LEVEL, BYTE_LEVEL.encode("🎊 ß 語", add_special_tokens=False).ids),
        (LLAMA2, byte_ids(LLAMA2, "🎊語") + LLAMA2.encode("hello", add_special_tokens=False).ids),
    ],
    ids=["byte-level", "byte-fallback"],
)
def test_characters_come_whole(tokenizer, ids):
    """Token by token, a character of several tokens appears at once and never as a replacement character."""
    texts = pieces_of(tokenizer, ids, [1], True)
    assert not any("\ufffd" in text for text in texts)
    assert sum(bool(text) for text in texts) < len(ids)


def test_text_is_not_held_back_needlessly():
    ids = BYTE_LEVEL.encode("hello world", add_special_tokens=False).ids
    assert all(pieces_of(BYTE_LEVEL, ids, [1], True)[:-1])


def test_unfinished_character_is_flushed_as_replacement():
    ids = BYTE_LEVEL.encode("語", add_special_tokens=False).ids
    cut = byte_ids(LLAMA2, "語")[:2]
    texts = pieces_of(LLAMA2, cut, [1], True)
    assert texts == ["", "", "\ufffd\ufffd"]
    assert "".join(pieces_of(BYTE_LEVEL, ids, [1], True)) == "語"


@pytest.mark.parametrize(("tokenizer", "kept"), [(BYTE_LEVEL, "<|user|>"), (LLAMA2, "<s>"), (METASPACE, "</s>")])
def test_some_special_tokens_may_be_kept(tokenizer, kept):
    special = [token_id for token_id, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    pieces = read_pieces(tokenizer)
    for _ in range(2):
        detokenizer = pieces.detokenizer(True, frozenset({tokenizer.token_to_id(kept)}))
        assert detokenizer.push(special) + detokenizer.flush() == kept
        detokenizer = pieces.detokenizer(True)
        assert detokenizer.push(special) + detokenizer.flush() == ""


def test_bytes_of_tokens():
    pieces = read_pieces(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("naïve 🎊", add_special_tokens=False).ids
    assert b"".join(map(pieces.bytes_of, ids)).decode() == "naïve 🎊"
    assert pieces.bytes_of(BYTE_LEVEL.token_to_id("<｜odd special｜>")).decode() == "<｜odd special｜>"
    assert pieces.bytes_of(10**6) == b""
    fallback = read_pieces(LLAMA2)
    assert fallback.bytes_of(byte_ids(LLAMA2, "A")[0]) == b"A"
    assert fallback.bytes_of(LLAMA2.token_to_id("▁hello")) == b" hello"


def test_a_repeated_replacement_character_takes_linear_time():
    """A client can make a model write it forever, and each token is detokenized in the event loop."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "▁a": 1, REPLACEMENT: 2}, "<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    ids = [1, *[2] * 15_000, 1]
    detokenizer = read_pieces(tokenizer).detokenizer(False)
    began = time.process_time()
    text = "".join([*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()])
    assert time.process_time() - began < 5
    assert text == tokenizer.decode(ids)
