"""The online benchmark's one command, on a tiny shape: real processes, every load answered, a table with every row."""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.common.client import Load
from loadtest.online.online_bench import joined

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
    scaled = ["--scale", "0.02", "--seconds", "0.5", "--max-model-len", "128", "--long", "--repeats", "2"]
    done = subprocess.run([*command, *scaled], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())["servers"]["ours"]
    assert list(results) == [
        "lone-tiny",
        *(f"{what}-{length}" for length in ("short", "long") for what in ("lone", "capacity", "medium", "heavy")),
        # The others do not fit into the model's positions.
        "lone-16k",
        "uneven",
    ]
    for key, result in results.items():
        assert result["failed"] == 0
        assert 0 < result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"]
        line = next(line for line in done.stdout.splitlines() if line.startswith(result["name"] + ", "))
        assert re.fullmatch(r".*  [\d.,]+ \([\d.,]+-[\d.,]+\)", line), key
        assert result["ttft_ms"]["p50"] == statistics.median(run["ttft_ms"]["p50"] for run in result["runs"])
        assert len(result["runs"]) == 2


def test_prompts_of_a_load_may_be_uneven() -> None:
    load = Load("k", "k", 300, 10, 200, least=20)
    lengths = load.lengths(1)
    assert (min(lengths), max(lengths)) != (300, 300)
    assert all(20 <= length <= 300 for length in lengths)
    assert lengths == load.lengths(1) != load.lengths(2)
    assert Load("k", "k", 300, 10, 5).lengths(1) == [300] * 5


def test_a_figure_of_several_runs_is_their_median_and_a_failure_stays() -> None:
    runs = [{"requests": 3, "failed": 0, "req_s": rate, "ttft_ms": {"p50": rate}} for rate in (1.0, 9.0, 2.0)]
    runs[1] |= {"failed": 2, "error": "refused"}
    result = joined(runs)
    assert (result["req_s"], result["ttft_ms"]["p50"], result["runs"]) == (2.0, 2.0, runs)
    assert (result["requests"], result["failed"], result["error"]) == (9, 2, "refused")


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
