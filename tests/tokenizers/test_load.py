"""Which files a tokenizer is read from, how a conversion is kept, and what is refused."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton_tokenizer.cache import cache_folder
from baton_tokenizer.draft import Draft
from baton_tokenizer.errors import NoTokenizerError, TokenizerError
from baton_tokenizer.load import load_tokenizer, read_tokenizer
from baton_tokenizer.sentencepiece import SentencePieceFile

from .samples import LLAMA, tiktoken_file, train_ranks, train_sentencepiece, write_folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", {"tokenizer.model": train_sentencepiece(LLAMA)})


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets an entry for each conversion of a SentencePiece model."""
    made: list[str] = []
    convert = SentencePieceFile.convert

    def counted(self: SentencePieceFile) -> Draft:
        made.append("converted")
        return convert(self)

    monkeypatch.setattr(SentencePieceFile, "convert", counted)
    return made


def test_a_conversion_is_kept(llama: Path, cache: Path, conversions: list[str]) -> None:
    first = read_tokenizer(llama)
    assert read_tokenizer(llama) == first
    assert conversions == ["converted"]
    [entry] = cache.iterdir()
    assert entry.suffix == ".json"
    assert list(llama.glob("tokenizer.json")) == [], "a model folder stays as it is"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"add_bos_token": False}),
        ("special_tokens_map.json", {"eos_token": "<s>"}),
        ("added_tokens.json", {"<new>": 600}),
        ("config.json", {"model_type": "mistral"}),
    ],
)
def test_a_changed_file_is_a_new_conversion(
    llama: Path, conversions: list[str], file: str, content: dict[str, Any]
) -> None:
    read_tokenizer(llama)
    (llama / file).write_text(json.dumps(content))
    read_tokenizer(llama)
    assert len(conversions) == 2


def test_a_newer_version_of_the_model_is_a_new_conversion(llama: Path) -> None:
    before = read_tokenizer(llama)
    (llama / "tokenizer.model").write_bytes(train_sentencepiece({**LLAMA, "vocab_size": 580}))
    assert read_tokenizer(llama) != before
    (llama / "tokenizer.model").write_bytes(train_sentencepiece(LLAMA))
    assert read_tokenizer(llama) == before


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x00" * 5000])
def test_a_damaged_entry_is_made_anew(llama: Path, cache: Path, conversions: list[str], damage: bytes) -> None:
    first = read_tokenizer(llama)
    [entry] = cache.iterdir()
    entry.write_bytes(entry.read_bytes()[: len(entry.read_bytes()) // 2] + damage)
    assert read_tokenizer(llama) == first
    assert read_tokenizer(llama) == first
    assert len(conversions) == 2


def test_without_a_place_for_the_cache_it_converts_each_time(
    llama: Path, tmp_path: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert read_tokenizer(llama) == read_tokenizer(llama)
    assert len(conversions) == 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache_folder() is None
    read_tokenizer(llama)
    assert len(conversions) == 3


def test_many_at_once_make_the_same(llama: Path, cache: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(read_tokenizer, [llama] * 8))
    assert all(text == made[0] for text in made)
    assert len(list(cache.iterdir())) == 1, "parts of entries stayed behind"


def test_tokenizer_json_comes_first_and_is_left_as_it_is(llama: Path, cache: Path) -> None:
    made = read_tokenizer(llama).json
    (llama / "tokenizer.json").write_text(made)
    (llama / "tokenizer.model").write_bytes(b"not read")
    assert read_tokenizer(llama).json == made
    assert len(list(cache.iterdir())) == 1


def test_names_of_special_tokens_come_from_both_files(llama: Path) -> None:
    (llama / "tokenizer.json").write_text(read_tokenizer(llama).json)
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<unk>", "odd": 1, "sep_token": 7}
    (llama / "special_tokens_map.json").write_text(json.dumps(tokens))
    (llama / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>", "pad_token": None}))
    assert read_tokenizer(llama).names == {"bos_token": "<s>", "eos_token": "<s>"}


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(NoTokenizerError, match=r"none of tokenizer\.json"):
        read_tokenizer(write_folder(tmp_path, {"vocab.json": "{}"}))


def test_two_tiktoken_files_are_one_too_many(tmp_path: Path) -> None:
    data = tiktoken_file(train_ranks())
    folder = write_folder(tmp_path, {"qwen.tiktoken": data, "o200k_base.tiktoken": data})
    with pytest.raises(TokenizerError, match="more than one tokenizer"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"tokenizer_config.json": "[1]"}, "tokenizer_config.json does not hold a JSON object"),
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json does not hold a JSON object"),
        ({"tokenizer_config.json": {"legacy": "yes"}}, "legacy in .* must be true or false"),
        ({"tokenizer_config.json": {"added_tokens_decoder": []}}, None),
        ({"tokenizer_config.json": {"added_tokens_decoder": [1]}}, "must be an object"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "a"}}}}, "'x' is not a token id"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"-1": {"content": "a"}}}}, "'-1' is not a token id"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}}, "is not a token id"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"600": {}}}}, "no content"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"600": {"content": "<s>"}}}}, "ids 1 and 600"),
        ({"tokenizer_config.json": {"bos_token": "a:b"}}, "cannot be put around"),
        ({"added_tokens.json": {"<new>": "many"}}, "added_tokens.json: 'many' is not a token id"),
        ({"special_tokens_map.json": "nothing"}, "special_tokens_map.json does not hold"),
    ],
)
def test_invalid_files_are_named(llama: Path, files: dict[str, Any], why: str | None) -> None:
    write_folder(llama, files)
    if why is None:
        read_tokenizer(llama)
        return
    with pytest.raises(TokenizerError, match=why):
        read_tokenizer(llama)


@pytest.mark.parametrize("content", [b"{}", b"[]", b"\xff", b'{"model": 1}', b""])
def test_an_invalid_tokenizer_json_is_named(llama: Path, content: bytes) -> None:
    (llama / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(llama)


def test_a_file_that_is_too_large_is_not_read(llama: Path) -> None:
    with (llama / "tokenizer.json").open("wb") as file:
        os.truncate(file.fileno(), 300 << 20)
    with pytest.raises(TokenizerError, match="larger than 256 MiB"):
        read_tokenizer(llama)


@pytest.mark.processes
def test_conversion_needs_neither_torch_nor_transformers_nor_sentencepiece(llama: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from baton_tokenizer.load import load_tokenizer; "
        "print(len(load_tokenizer(Path(sys.argv[1])).encode('Hello').ids)); "
        "print(sorted({'torch', 'transformers', 'sentencepiece', 'tiktoken'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(llama)], capture_output=True, text=True, check=True)
    tokens, modules = done.stdout.splitlines()
    assert int(tokens) > 1
    assert modules == "[]"
