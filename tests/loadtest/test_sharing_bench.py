"""The benchmark of two engines on the same cores, on a tiny model: real processes, every request answered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeModel

from .test_engine_bench import FOLDER

pytestmark = pytest.mark.processes


@pytest.mark.timeout(150)
def test_both_ways_answer_the_same_requests(tiny_model: MakeModel, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "online" / "sharing_bench.py"), str(tiny_model("llama")), "--out", str(out)]
    load = ["--rates", "4,8", "--seconds", "0.5", "--inputs", "16", "--outputs", "4", "--beside", "busy"]
    done = subprocess.run([*command, *load], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["summary"]
    assert [(row["beside"], row["rate"], row["way"], row["failed"]) for row in rows] == [
        ("busy", rate, way, 0) for rate in (4, 8) for way in ("cores", "chosen")
    ]
    assert all(0 < row["p50"] <= row["p99"] and row["cpu_ms"] > 0 for row in rows)
    assert "TTFT p50 ms" in done.stdout
    # Each way is what it is called.
    logs = {way: (tmp_path / f"out.{way}.log").read_text() for way in ("cores", "chosen")}
    cores = len(os.sched_getaffinity(0))
    assert logs["cores"].count(f"threads: {cores} (as --num-threads says)") == 2
    assert logs["chosen"].count("for 2 engine processes") == 2
