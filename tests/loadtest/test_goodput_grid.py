"""Goodput from what `baton bench serve` writes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.handover.goodput_grid import Promise, curves, plot, table

from .test_engine_bench import FOLDER

PROMISES = [Promise(200, 10), Promise(400, 10)]


def result(
    target: str, offered: float, times: list[tuple[float, float | None]], outcome: str = "completed"
) -> dict[str, Any]:
    sent = [{"ttft": ttft, "tpot": tpot, "outcome": outcome} for ttft, tpot in times]
    return {"target": target, "load": f"{offered:.0f}/s", "offered_req_s": offered, "requests_sent": sent}


@pytest.fixture
def reports() -> list[dict[str, Any]]:
    first = [
        result("pd", 8.0, [(0.5, 0.005)] * 4),
        result("pd", 4.0, [(0.1, 0.005), (0.1, None), (0.3, 0.005), (0.1, 0.011)]),
        result("replicas", 4.0, [(0.1, 0.005)] * 4, "failed"),
        result("replicas", 8.0, [(0.2, 0.010)] * 4),
    ]
    return [{"results": first}, {"results": [result("pd", 4.2, [(0.1, 0.005)] * 4)]}]


def test_a_request_is_good_within_both_times(reports: list[dict[str, Any]]) -> None:
    found = curves(reports, PROMISES)
    assert [point.offered for point in found["pd"]] == pytest.approx([4.1, 8.0])
    assert [list(point.shares.values()) for point in found["pd"]] == [[6 / 8, 7 / 8], [0, 0]]
    assert [list(point.shares.values()) for point in found["replicas"]] == [[0, 0], [1, 1]]


@pytest.mark.processes
def test_table_and_plot_name_every_load_promise_and_target(reports: list[dict[str, Any]], tmp_path: Path) -> None:
    found = curves(reports, PROMISES)
    assert table(found, PROMISES).splitlines() == [
        "| pd / replicas | 4.1/s | 8.0/s |",
        "| --- | --- | --- |",
        "| 200 ms, 10 ms | 75% / 0% | 0% / 100% |",
        "| 400 ms, 10 ms | 88% / 0% | 0% / 100% |",
    ]
    image = plot(found, PROMISES)
    assert len(re.findall("<polyline", image)) == 4
    file, svg = tmp_path / "result.json", tmp_path / "plot.svg"
    file.write_text(json.dumps(reports[0]))
    command = [
        sys.executable,
        str(FOLDER / "handover" / "goodput_grid.py"),
        str(file),
        "--ttft",
        "200",
        "--tpot",
        "10",
        "--svg",
        str(svg),
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "| 200 ms, 10 ms | 50% / 0% | 0% / 100% |" in printed
    assert svg.read_text().count("<polyline") == 2
