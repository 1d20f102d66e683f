"""A run that was interrupted goes on where it ended, and writes the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton_demo import MODEL_DIR
from baton_engine.config import ConfigError
from tests.conftest import MakeModel

from .conftest import quantize

SETTINGS = {"samples": 4, "length": 64}


class KilledError(Exception):
    pass


class KillAt:
    """A progress that ends the run at a call with this number."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, work: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.left -= 1
        if self.left == 0:
            raise KilledError


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def source(tiny_model: MakeModel) -> Path:
    return tiny_model("llama", num_hidden_layers=3, tie_word_embeddings=False)


@pytest.fixture(scope="module", params=["int4-awq", "int4-gptq", "fp8"])
def whole(
    request: pytest.FixtureRequest, source: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, bytes]]:
    """A format, and what a run without interruption writes."""
    folder = tmp_path_factory.mktemp("whole") / "to"
    quantize(source, folder, request.param, conversations, **SETTINGS)
    return request.param, contents(folder)


def test_interrupted_runs_write_the_same_bytes(
    whole: tuple[str, dict[str, bytes]], source: Path, conversations: Path, tmp_path: Path
) -> None:
    format, expected = whole
    folder, interruptions = tmp_path / "to", 0
    for at in (2, 5, 9, 14, 20, 27):
        if (folder / "config.json").exists():
            break
        try:
            quantize(source, folder, format, conversations, progress=KillAt(at), **SETTINGS)
        except KilledError:
            interruptions += 1
            assert not (folder / "config.json").exists()
    assert interruptions >= 2
    kept = {path.name: path.stat().st_ino for path in folder.glob("*.safetensors")}
    if not (folder / "config.json").exists():
        assert kept
        quantize(source, folder, format, conversations, **SETTINGS)
    assert contents(folder) == expected
    # Finished shards are not written again.
    assert kept.items() <= {path.name: path.stat().st_ino for path in folder.glob("*.safetensors")}.items()


def test_damaged_and_missing_shards_are_made_again(source: Path, conversations: Path, tmp_path: Path) -> None:
    folder, other = tmp_path / "to", tmp_path / "other"
    quantize(source, other, "int4-gptq", conversations, **SETTINGS)
    with pytest.raises(KilledError):
        # At the end of the last layer.
        quantize(source, folder, "int4-gptq", conversations, progress=KillAt(3 * (2 + 2 * 5)), **SETTINGS)
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    second.unlink()
    (folder / ".model-00002-of-00004.safetensors.7.part").write_bytes(b"half of a shard")
    quantize(source, folder, "int4-gptq", conversations, **SETTINGS)
    assert contents(folder) == contents(other)


def test_other_settings_and_other_folders_are_refused(
    source: Path, conversations: Path, tmp_path: Path, tiny_model: MakeModel
) -> None:
    folder = tmp_path / "to"
    with pytest.raises(KilledError):
        quantize(source, folder, "int4-gptq", conversations, progress=KillAt(9), **SETTINGS)
    for format, model, more, named in (
        ("int4-awq", source, {}, "format"),
        ("int4-gptq", source, {"samples": 3}, "calibration text"),
        ("int4-gptq", source, {"dtype": "bfloat16"}, "dtype"),
        ("int4-gptq", tiny_model("llama", num_hidden_layers=3, seed=1), {}, "source"),
    ):
        with pytest.raises(ConfigError, match=f"unfinished run with another {named}; remove it"):
            quantize(model, folder, format, conversations, **{**SETTINGS, **more})
    for occupied in (tmp_path, source, source / "config.json"):
        with pytest.raises(ConfigError, match="is no unfinished run of this command; name a new folder"):
            quantize(source, occupied, "int4-gptq", conversations, **SETTINGS)
    (folder / ".quantize.json").write_text("{")
    with pytest.raises(ConfigError, match=r"\.quantize\.json cannot be used"):
        quantize(source, folder, "int4-gptq", conversations, **SETTINGS)


def test_weights_that_are_not_finite_are_named(source: Path, conversations: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in source.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has numbers that are not finite"):
        quantize(broken, tmp_path / "to", "int8", conversations, **SETTINGS)


@pytest.mark.processes
def test_the_command_goes_on_after_it_was_killed(conversations: Path, tmp_path: Path) -> None:
    def command(folder: Path) -> list[str]:
        text = ["--calibrate", str(conversations), "--samples", "24", "--length", "128", "--device", "cpu", "--json"]
        return [sys.executable, "-m", "baton_cli", "model", "quantize", str(MODEL_DIR), str(folder),
                "--format", "int4-gptq", *text]  # fmt: skip

    killed = tmp_path / "killed"
    with subprocess.Popen(command(killed), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 60
        while not (killed / "model-00002-of-00007.safetensors").exists() and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (killed / "config.json").exists()
    kept = (killed / "model-00001-of-00007.safetensors").stat().st_ino
    run = subprocess.run(command(killed), capture_output=True, text=True, check=False, env=os.environ)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["after"]["bytes"] < report["before"]["bytes"]
    assert "layer 1 of 6" in run.stderr
    assert (killed / "model-00001-of-00007.safetensors").stat().st_ino == kept
