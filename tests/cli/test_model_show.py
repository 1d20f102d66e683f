"""`baton model`, in this process."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from baton_cli.errors import BadSetting, UserError
from baton_cli.model import app
from baton_demo import MODEL_DIR
from tests.conftest import MakeModel


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_folder_alone_is_shown(tiny_model: MakeModel) -> None:
    folder = tiny_model("gemma3")
    text = run(folder, "--gpu", "L4", "--gpu", "24GiB", "--dtype", "bfloat16")
    assert text == run("show", folder, "--gpu", "l4", "--gpu", "24GiB", "--dtype", "bfloat16")
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["family"].endswith("gemma3.Gemma3")
    assert "2 of 19 tokens" in lines["KV of windows"]
    assert "fit" in lines["l4"]
    assert "fit" in lines["24GiB"]
    assert "h200" not in lines


def test_without_a_folder_it_is_the_demo_model() -> None:
    text = run()
    assert text == run("show", MODEL_DIR)
    assert "2,755,008" in text
    assert {"h200", "l4"} <= {line.split("  ")[0] for line in text.splitlines()}


def test_a_model_that_is_not_served_or_does_not_fit_says_why(tmp_path: Path) -> None:
    config: dict[str, Any] = {"architectures": ["QuokkaForCausalLM\x1b[2J"], "num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = run(tmp_path)
    # What others wrote does not control the terminal.
    assert "unknown architecture QuokkaForCausalLM?[2J" in text
    assert "weights        none in this folder" in text
    assert "GPU" not in text
    assert "do not fit" in run(MODEL_DIR, "--gpu", "0.001GiB")


def test_json_is_for_scripts() -> None:
    facts = json.loads(run("show", MODEL_DIR, "--json", "--gpu", "h200"))
    assert facts["served"]["parameters"] == 2_755_008
    assert facts["served"]["gpus"]["h200"]["weights_fit"] is True
    assert facts["not_served"] is None
    in_fp8 = json.loads(run("show", MODEL_DIR, "--json", "--gpu", "h200", "--kv-cache-dtype", "fp8"))
    assert in_fp8["served"]["kv_dtype"] == "float8_e4m3fn"
    assert in_fp8["served"]["kv_bytes_per_token"] * 2 == facts["served"]["kv_bytes_per_token"]


def test_scales_are_written_for_workers(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    assert "scales of 6 layers" in run("kv-scales", MODEL_DIR, file, "--device", "cpu")
    assert {tuple(tensor.shape) for tensor in load_file(file).values()} == {(2,)}
    with pytest.raises(UserError, match=r"config\.json"):
        run("kv-scales", tmp_path, file)


def test_without_the_packages_of_a_worker_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "baton_cli.model_facts", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"baton\[worker\].*torch"):
        run(MODEL_DIR)


def test_errors_are_for_users(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a model folder"):
        run(tmp_path)
    for name in ("h300", "-1GiB", "GiB", "24"):
        with pytest.raises(BadSetting, match=f"--gpu '{name}'"):
            run(MODEL_DIR, "--gpu", name)
    with pytest.raises(UserError, match="--dtype 'int3'"):
        run(MODEL_DIR, "--dtype", "int3")
