"""A hub with a model of a few megabytes of random bytes, which this process and others can pull."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from .double import HubDouble

SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "LICENSE.txt"}
_UNWANTED = ("pytorch_model.bin", "modeling_tiny.py", "consolidated.safetensors", "README.md", "model.gguf")


@pytest.fixture
def hub(processes: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    content = random.Random(0).randbytes(2 << 20)
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}
    files = {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "tokenizer.json": content[:1000],
        "chat_template.jinja": b"",
        "LICENSE.txt": b"Apache License",
        "model.safetensors.index.json": json.dumps(index).encode(),
        SHARDS[0]: content,
        SHARDS[1]: content[: 1 << 20],
        **dict.fromkeys(_UNWANTED, b"not needed"),
    }
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    with HubDouble(files).running() as running:
        use(running.url, monkeypatch)
        yield running


def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have huggingface_hub in this process use a hub; it reads HF_ENDPOINT when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
