"""Which files of a repository are downloaded."""

import json

import pytest

from baton_hub.errors import HubError
from baton_hub.selection import text_files, weight_files


def test_what_gateways_read_and_nothing_else() -> None:
    wanted = ["config.json", "generation_config.json", "qwen.tiktoken", "tokenizer.model", "chat_template.jinja"]
    wanted += ["additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja"]
    wanted += ["vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "LICENSE", "tokenizer.json"]
    other = ["model.safetensors", "pytorch_model.bin", "modeling_x.py", "original/tokenizer.model", "x.gguf", "a.pt"]
    other += [
        "README.md",
        "pytorch_model.bin.index.json",
        "onnx/config.json",
        "onnx/chat_template.jinja",
        "additional_chat_templates/config.json",
        "training_args.bin",
        "flax_model.msgpack",
    ]
    assert sorted(text_files([*other, *wanted])) == sorted(wanted)


def test_the_weights_that_the_index_names() -> None:
    names = ["model-1.safetensors", "model-2.safetensors", "consolidated.safetensors", "model.safetensors"]
    index = json.dumps({"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"}}).encode()
    assert weight_files(names, index) == ["model-1.safetensors", "model-2.safetensors"]
    assert weight_files(names, None) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, r"neither model\.safetensors nor"),
        (b'{"weight_map": {"a": "model-9.safetensors"}}', r"names 'model-9\.safetensors'"),
        (b'{"weight_map": {"a": "../model.safetensors"}}', r"names '\.\./model"),
        (b'{"weight_map": {"a": "pytorch_model.bin"}}', "no safetensors file"),
        (b'{"weight_map": {"a": 1}}', "names no files"),
        (b'{"weight_map": {"a": {}}}', "is not an index"),
        (b'{"weight_map": {}}', "names no files"),
        (b'{"weight_map": []}', "is not an index"),
        (b"[]", "is not an index"),
        (b"[" * 100_000, "is not an index"),
        (b"\xff", "is not an index"),
    ],
)
def test_weights_that_cannot_be_chosen(index: bytes | None, message: str) -> None:
    with pytest.raises(HubError, match=message):
        weight_files(["model-1.safetensors", "pytorch_model.bin"], index)
