"""Converted tiktoken files give the tokens of tiktoken itself, with the patterns that the models' authors publish."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tiktoken_ext.openai_public as openai
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from baton_tokenizer.errors import TokenizerError
from baton_tokenizer.load import load_tokenizer, read_tokenizer

from .samples import TEXTS, tiktoken_file, train_ranks, write_folder

REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
LETTERS = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]")
KIMI = (
    r"[\p{Han}]+|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}*{LETTERS[1]}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}+{LETTERS[1]}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    rf"\p{{N}}{{1,3}}|{REST}"
)
# File name and model_type of each kind.
KINDS = {
    "qwen": ("qwen.tiktoken", "qwen"),
    "llama3": ("tokenizer.model", "llama"),
    "kimi": ("tiktoken.model", "kimi_k2"),
    "glm4": ("tokenizer.model", "chatglm"),
    "cl100k": ("cl100k_base.tiktoken", ""),
    "o200k": ("o200k_base.tiktoken", ""),
}
FIRST = 450
PIECES = [
    "a",
    "B",
    "'s",
    "'S",
    "ſ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    " ",
    "1",
    "23",
    "²",
    "日本",
    "é",
    "e\u0301",
    "=",
    "/",
    "👨‍👩‍👧",
    "_",
]
PROMPTS = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))


def pattern_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if kind in ("cl100k", "o200k"):
        monkeypatch.setattr(openai, "load_tiktoken_bpe", lambda *_, **__: {})
        return str(openai.ENCODING_CONSTRUCTORS[f"{kind}_base"]()["pat_str"])
    thousands = rf"{WORDS}|\p{{N}}{{1,3}}|{REST}"
    return {"qwen": rf"{WORDS}|\p{{N}}|{REST}", "llama3": thousands, "glm4": thousands, "kimi": KIMI}[kind]


def folder_of(kind: str, path: Path, **settings: Any) -> Path:
    file, model_type = KINDS[kind]
    return write_folder(path, {file: tiktoken_file(train_ranks())}, model_type, **settings)


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Tokenizer, Any]:
    kind = request.param
    with pytest.MonkeyPatch.context() as patch:
        pattern = pattern_of(kind, patch)
    encoding = tiktoken.Encoding(kind, pat_str=pattern, mergeable_ranks=train_ranks(), special_tokens={})
    return kind, load_tokenizer(folder_of(kind, tmp_path_factory.mktemp("m"), add_bos_token=False)), encoding


def assert_same(kind: str, tokenizer: Tokenizer, encoding: Any, text: str) -> None:
    # Qwen's own code composes texts before it gives them to tiktoken.
    composed = unicodedata.normalize("NFC", text) if kind == "qwen" else text
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == encoding.encode(composed), repr(text)
    assert tokenizer.decode(ids) == composed


def test_tokens_are_those_of_tiktoken(both: tuple[str, Tokenizer, Any]) -> None:
    for text in TEXTS:
        assert_same(*both, text)


@hypothesis_settings(max_examples=120)
@given(text=PROMPTS.filter(lambda text: not any(mark in text for mark in ("<|", "MASK]", "op>"))))
def test_any_text_has_the_tokens_of_tiktoken(both: tuple[str, Tokenizer, Any], text: str) -> None:
    # The library has the tables of an older Unicode, and composes newer characters in another order.
    if both[0] != "qwen" or all(unicodedata.combining(char) == 0 or char in "\u0301\u0327" for char in text):
        assert_same(*both, text)


def test_llama_3_is_as_in_transformers(tmp_path: Path) -> None:
    settings = {
        "added_tokens_decoder": {
            str(FIRST): {"content": "<|begin_of_text|>", "special": True},
            str(FIRST + 1): {"content": "<|end_of_text|>", "special": True},
            str(FIRST + 9): {"content": "<|eot_id|>", "special": True},
        },
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
    }
    tokenizer = load_tokenizer(folder_of("llama3", tmp_path, **settings))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, "<|begin_of_text|>a<|eot_id|> b", "x <|end_of_text|>"):
        assert tokenizer.encode(text).ids == reference.encode(text), repr(text)
        assert tokenizer.decode(tokenizer.encode(text).ids) == reference.decode(
            reference.encode(text), skip_special_tokens=True
        )
    assert tokenizer.token_to_id("<|start_header_id|>") == FIRST + 6
    assert tokenizer.token_to_id("<|reserved_special_token_250|>") == FIRST + 255


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("qwen", {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<|extra_0|>": 3, "<|extra_204|>": 207}),
        ("llama3", {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|eot_id|>": 9}),
        ("kimi", {"<|reserved_token_450|>": 0, "<|reserved_token_705|>": 255}),
        ("glm4", {"<|endoftext|>": 0, "[gMASK]": 2, "<sop>": 4, "<|user|>": 7, "<|observation|>": 9}),
        ("cl100k", {"<|endoftext|>": 1, "<|fim_suffix|>": 4, "<|endofprompt|>": 20}),
        ("o200k", {"<|endoftext|>": 1, "<|endofprompt|>": 20}),
    ],
)
def test_special_tokens_follow_the_vocabulary(tmp_path: Path, kind: str, ids: dict[str, int]) -> None:
    text = read_tokenizer(folder_of(kind, tmp_path, add_bos_token=False))
    tokenizer = text.load()
    for token, offset in ids.items():
        around = [tokenizer.encode(letter, add_special_tokens=False).ids for letter in "ab"]
        ids = tokenizer.encode(f"a{token}b", add_special_tokens=False).ids
        assert ids == [*around[0], FIRST + offset, *around[1]]
        assert tokenizer.decode([FIRST + offset]) == ""
    assert text.names.get("eos_token") == {"llama3": "<|end_of_text|>", "kimi": None}.get(kind, "<|endoftext|>")


def test_texts_of_glm_4_begin_with_its_mask(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of("glm4", tmp_path, tokenizer_class="ChatGLM4Tokenizer"))
    plain = tokenizer.encode("ab", add_special_tokens=False).ids
    assert tokenizer.encode("ab").ids == [FIRST + 2, FIRST + 4, *plain]


def test_tokens_named_in_tokenizer_config_replace_those_of_the_kind(tmp_path: Path) -> None:
    settings = {
        "added_tokens_decoder": {str(FIRST + 5): {"content": "[EOS]", "special": True}},
        "eos_token": "[EOS]",
        "additional_special_tokens": ["<|reserved_token_451|>", "[NEW]"],
    }
    tokenizer = load_tokenizer(folder_of("kimi", tmp_path, **settings))
    assert tokenizer.encode("[EOS]").ids == [FIRST + 5]
    assert tokenizer.token_to_id("<|reserved_token_455|>") is None
    assert tokenizer.encode("[NEW]").ids == [FIRST + 256]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"YQ== 1\nnonsense\n", "line 2"),
        (b"YQ== 1\nYQ 2\n", "base64"),
        (b"YQ== 1\nYg== 1\n", "same rank"),
        (b"YQ== 99999999999\n", "line 1"),
        (b"QUFB" * 400 + b" 1\n", "longer than"),
        (b"YQ== 1\n", "byte"),
        (b"", "byte"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, data: bytes, why: str) -> None:
    folder = write_folder(tmp_path, {"qwen.tiktoken": data})
    with pytest.raises(TokenizerError, match=why) as refusal:
        read_tokenizer(folder)
    assert "qwen.tiktoken" in str(refusal.value)


def test_a_file_whose_pattern_is_unknown_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"other.tiktoken": tiktoken_file(train_ranks())}, "other")
    with pytest.raises(TokenizerError, match=r"put a tokenizer\.json beside it"):
        read_tokenizer(folder)
