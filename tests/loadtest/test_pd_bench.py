"""The benchmark of prefill and decode apart, on a tiny shape."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .test_engine_bench import FOLDER

pytestmark = pytest.mark.processes


def test_it_measures_both_ways_in_one_run(shape: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "pd.json"
    command = [
        sys.executable,
        str(FOLDER / "handover" / "pd_bench.py"),
        str(shape),
        "--out",
        str(out),
        "--transport",
        "tcp",
    ]
    scaled = ["--scale", "0.05", "--seconds", "0.5", "--repeats", "3", "--set", "device=cpu", "--set", "num_blocks=256"]
    done = subprocess.run([*command, *scaled], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    assert rows["200 tokens, lone TTFT P/D, ms"] > 0
    assert {"200 tokens, exposed hand-over, ms", "slower by, %"} <= rows.keys()
