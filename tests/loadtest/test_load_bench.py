"""The benchmark of loading, on a tiny shape: ways bring the same bytes, and one that fails spoils only its row."""

import json
import os
import sys
from pathlib import Path

import pytest

from baton_engine import runner
from baton_engine.loading import Weights
from loadtest.common.random_weights import write_random_weights
from loadtest.engine import load_bench, load_ways
from loadtest.engine.load_ways import LoadJob, TimedWeights


@pytest.fixture
def folder(shape: Path) -> Path:
    write_random_weights(shape, 0)
    return shape


def test_baton_and_the_way_before_it_load_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for way in ("ours", "one-by-one"):
        job = LoadJob(way=way, folder=str(folder), began=0.0, threads=2, piece_bytes=1000)
        monkeypatch.setattr(TimedWeights, "job", job, raising=False)
        results.append(load_ways.load(job))
    ours, before = results
    assert ours["bytes"] == before["bytes"] > 10_000
    assert ours["sum"] == before["sum"] > 0
    assert min(ours["seconds"], before["seconds"]) > 0


@pytest.mark.parametrize("way", ["ours", "one-by-one"])
def test_an_engine_starts_with_either(folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Weights", Weights)  # restored afterwards
    job = LoadJob(way=way, folder=str(folder), began=0.0, ours={"num_threads": 1, "num_blocks": 64})
    monkeypatch.setattr(TimedWeights, "job", job, raising=False)
    monkeypatch.setattr(TimedWeights, "seconds", 0.0)
    result = load_ways.start(job)
    assert 0 < result["weights"] < result["ready"] < result["answer"]


@pytest.mark.processes
def test_one_command_prints_a_row_for_each_way_and_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules, out = folder.parent / "modules", folder.parent / "out.json"
    modules.mkdir()
    (modules / "fastsafetensors.py").write_text("raise OSError('no such disk')")
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setenv("PYTHONPATH", f"{modules}:{os.environ.get('PYTHONPATH', '')}")
    flags = ["--ways", "ours,fastsafetensors", "--engines", "", "--sources", "disk", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["load_bench.py", str(folder), *flags])
    with pytest.raises(SystemExit) as ended:
        load_bench.main()
    assert ended.value.code == 1, "a failed row must show in the exit code"
    ours, other = json.loads(out.read_text())["rows"]
    assert (ours["way"], ours["source"]) == ("ours", "disk")
    assert ours["rate"] == pytest.approx(ours["bytes"] / ours["seconds"])
    assert other["error"] == "OSError: no such disk"
    assert "fastsafetensors  disk" in capsys.readouterr().out
