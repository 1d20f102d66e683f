"""The same loads on prefill and decode apart and on two replicas, on a tiny shape."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .test_engine_bench import FOLDER

pytestmark = pytest.mark.processes


def test_both_layouts_get_the_same_requests(shape: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(FOLDER / "handover" / "pd_load.py"), str(shape), "--out", str(out)]
    command += ["--set", "device=cpu", "--set", "num_blocks=256", "--set-decode", "max_num_seqs=16"]
    command += ["--load", "--rates 6 --requests 8 --input-tokens 20-60 --output-tokens 8"]
    command += ["--load", "--rates 3,6 --requests 4 --input-tokens 100 --output-tokens 2-5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    sent = {}
    for layout in ("pd", "replicas"):
        results = [r for number in (0, 1) for r in json.loads((out / f"{layout}-{number}.json").read_text())["results"]]
        assert [result["target"] for result in results] == [layout] * 3
        requests = [request for result in results for request in result["requests_sent"]]
        assert {request["outcome"] for request in requests} == {"completed"}
        sent[layout] = [(round(r["due"], 6), r["prompt_tokens"], r["asked"]) for r in requests]
    assert sent["pd"] == sent["replicas"]
    assert len(sent["pd"]) == 16
    assert 'by="prefill"' in done.stdout
