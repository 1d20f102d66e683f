"""vocab.json and merges.txt give the tokens of transformers' own classes."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from baton_tokenizer.errors import TokenizerError
from baton_tokenizer.load import load_tokenizer, read_tokenizer

from .samples import TEXTS, write_folder

END = "<|endoftext|>"


def files(*special: str) -> dict[str, str]:
    """Return a vocabulary and merges that were trained on the texts, with special tokens at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    model = json.loads(tokenizer.to_str())["model"]
    vocab = {**model["vocab"], **{token: len(model["vocab"]) + n for n, token in enumerate(special)}}
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])])
    return {"vocab.json": json.dumps(vocab), "merges.txt": merges + "\n"}


CASES: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
    "gpt2": ((END,), "gpt2", {"tokenizer_class": "GPT2Tokenizer"}),
    "gpt2, space and begin": (
        ("</s>", END),
        "gpt2",
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True, "bos_token": "</s>"},
    ),
    "qwen2": (
        (),
        "qwen2_moe",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "added_tokens_decoder": {
                "420": {"content": END, "special": True, "normalized": False},
                "421": {"content": "<|im_end|>", "special": True, "normalized": False},
                "422": {"content": "<think>", "special": False, "normalized": False},
            },
            "eos_token": "<|im_end|>",
            "bos_token": None,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    special, model_type, settings = CASES[case]
    text = read_tokenizer(write_folder(tmp_path, files(*special), model_type, **settings))
    tokenizer, reference = text.load(), AutoTokenizer.from_pretrained(tmp_path)
    for sample in (*TEXTS, f"a{END} b", "x<|im_end|>", "<think>\nhm</think>", "</s>a</s>"):
        ids = tokenizer.encode(sample).ids
        assert ids == reference.encode(sample), repr(sample)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert text.names["eos_token"] == reference.eos_token
    assert text.names.get("bos_token") == reference.bos_token


def test_the_class_follows_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, files(END), "gpt2")
    assert load_tokenizer(folder).encode(f"a{END}").ids[-1] == 420
    assert read_tokenizer(folder).names == dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)


@pytest.mark.parametrize(
    ("changed", "settings", "why"),
    [
        ({}, {"tokenizer_class": "RobertaTokenizer"}, "RobertaTokenizer are not served"),
        ({}, {}, r"\(none\) are not served"),
        ({"merges.txt": "no such pair here\n"}, {"tokenizer_class": "GPT2Tokenizer"}, "merges.txt"),
        ({"merges.txt": "zzzz yyyy\n"}, {"tokenizer_class": "GPT2Tokenizer"}, "merges.txt"),
        ({"vocab.json": "[1]"}, {"tokenizer_class": "GPT2Tokenizer"}, "vocab.json"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changed: dict[str, str], settings: dict[str, Any], why: str) -> None:
    folder = write_folder(tmp_path, {**files(END), **changed}, "other", **settings)
    with pytest.raises(TokenizerError, match=why):
        read_tokenizer(folder)
