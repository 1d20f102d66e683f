"""The online benchmark's one command, on a tiny shape: real processes, every load answered, a table with every row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_engine_bench import FOLDER

pytestmark = pytest.mark.processes


def test_every_load_is_answered_and_every_row_printed(shape: Path) -> None:
    out = shape / "out.json"
    command = [
        sys.executable,
        str(FOLDER / "online" / "online_bench.py"),
        str(shape),
        "--out",
        str(out),
        "--servers",
        "ours",
    ]
    scaled = ["--scale", "0.05", "--seconds", "1", "--pace", "0.5", "--max-model-len", "512"]
    done = subprocess.run([*command, *scaled], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())["servers"]["ours"]
    assert list(results) == [
        "lone-tiny",
        *(f"{what}-{length}" for length in ("short", "long") for what in ("lone", "capacity", "medium", "heavy")),
    ]
    for key, result in results.items():
        assert result["failed"] == 0
        assert 0 < result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"]
        line = next(line for line in done.stdout.splitlines() if line.startswith(result["name"] + ", "))
        assert line.split()[-1] != "-", key


def test_a_server_that_does_not_start_fails_the_run(shape: Path) -> None:
    out = shape / "out.json"
    command = [
        sys.executable,
        str(FOLDER / "online" / "online_bench.py"),
        str(shape),
        "--out",
        str(out),
        "--servers",
        "ours",
    ]
    done = subprocess.run(
        [*command, "--set", "block_size=-1"], capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert done.returncode == 1
    assert "not ready" in done.stdout
    assert "block-size" in done.stdout.replace("_", "-")
