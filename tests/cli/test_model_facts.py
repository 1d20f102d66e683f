"""Facts of a model folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from baton_cli.errors import UserError
from baton_cli.model_facts import model_facts

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": np.zeros((3, 5), np.float16), "b": np.zeros(7, np.float16)}, tmp_path / "model-1.safetensors")
    save_file({"c": np.zeros((), np.float32)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_counts_parameters_over_all_files(folder: Path) -> None:
    assert model_facts(folder) == {
        "architecture": "LlamaForCausalLM",
        "parameters": "23",
        "dtype": "F16, F32",
        "layers": "2",
        "heads": "8 (4 for keys and values)",
        "hidden size": "64",
        "vocabulary": "512",
        "context": "2048 tokens",
    }


def test_without_grouped_queries_all_heads_count(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_key_value_heads": None}))
    assert model_facts(folder)["heads"] == "8 (8 for keys and values)"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        (1 << 60).to_bytes(8, "little"),
        (9).to_bytes(8, "little") + b"not JSON!",
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b'{"a": 1}',
    ],
)
def test_broken_weights_are_named(folder: Path, content: bytes) -> None:
    (folder / "model-2.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model-2\.safetensors"):
        model_facts(folder)


def test_a_folder_without_weights_or_config_is_refused(folder: Path) -> None:
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UserError, match=r"no \.safetensors files"):
        model_facts(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json"):
        model_facts(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="is no model folder"):
        model_facts(folder)
