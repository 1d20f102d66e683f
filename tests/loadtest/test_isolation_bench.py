"""The benchmark of isolation between tenants, on a tiny shape: real processes, every request answered."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .test_engine_bench import FOLDER

pytestmark = pytest.mark.processes


def test_both_tenants_are_answered_and_the_goal_is_judged(shape: Path) -> None:
    out = shape / "out.json"
    command = [
        sys.executable,
        str(FOLDER / "online" / "isolation_bench.py"),
        str(shape),
        "--out",
        str(out),
        "--rounds",
        "2",
    ]
    scaled = ["--seconds", "1.5", "--calibration", "3", "--short", "16", "--long", "300", "--set", "num_blocks=256"]
    slow = ["--share", "0.02", "--flood-share", "0.05"]  # of what a tiny model does in a second
    done = subprocess.run([*command, *scaled, *slow], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert [r["failed"] for r in report["rounds"]] == [{"A": 0, "B": 0}] * 2
    median = report["median"]
    for phase in ("alone", "alike", "long"):
        assert 0 < median[phase]["p50"] <= median[phase]["p99"]
    assert median["to_alone"]["p99"] > 0 < median["to_alike"]["p99"]
    assert median["b_req_s"] > 0
    assert median["load"] > 0
    assert "p99 of A moves by at most 20%: " in done.stdout
