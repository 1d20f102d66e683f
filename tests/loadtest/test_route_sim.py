"""The simulator on a small made-up trace, through the real router."""

import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def route_sim() -> ModuleType:
    from loadtest.routing import route_sim

    return route_sim


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace of ten conversations of ten turns, each with two blocks more than the one before."""
    rng = random.Random(0)
    rows = []
    for turn in range(10):
        for conversation in range(10):
            count = 2 * turn + 3
            rows.append(
                {
                    "timestamp": turn * 5000 + rng.randrange(4000),
                    "input_length": count * 512 - rng.randrange(511),
                    "output_length": rng.randrange(1, 50),
                    "hash_ids": [0, *(1000 * (conversation + 1) + block for block in range(count - 1))],
                }
            )
    rows.sort(key=lambda row: row["timestamp"])
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(route_sim: ModuleType, monkeypatch: pytest.MonkeyPatch, trace: Path, *options: str) -> dict[str, Any]:
    result = trace.with_suffix(".json")
    monkeypatch.setattr(sys, "argv", ["route_sim.py", str(trace), "--json", str(result), *options])
    route_sim.main()
    loaded: dict[str, Any] = json.loads(result.read_text())
    return loaded


def test_kv_aware_finds_the_prefixes(route_sim: ModuleType, monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    result = run(route_sim, monkeypatch, trace, "--no-local-prefill")
    rows = {row["policy"]: row for row in result["rows"]}
    assert set(rows) == {"kv_aware", "least_loaded", "round_robin", "random"}
    others = [row for name, row in rows.items() if name != "kv_aware"]
    # Each turn but the first finds all but its last few blocks.
    assert rows["kv_aware"]["hit_rate"] > 0.75
    assert rows["kv_aware"]["hit_rate"] > 1.5 * max(row["hit_rate"] for row in others)
    assert rows["kv_aware"]["ttft_p50_ms"] < min(row["ttft_p50_ms"] for row in others)


def test_a_run_is_repeated_exactly(route_sim: ModuleType, monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    runs = []
    for _ in range(2):
        rows = run(route_sim, monkeypatch, trace, "--limit", "60")["rows"]
        for row in rows:
            del row["simulated_in_s"]
        runs.append(rows)
    assert runs[0] == runs[1]


def test_without_prefill_pods_all_is_local(route_sim: ModuleType, monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    [row] = run(route_sim, monkeypatch, trace, "--prefills", "0", "--policies", "kv_aware")["rows"]
    assert row["local_share"] == 1


def test_the_plot_has_a_curve_and_a_bar_for_each_policy(
    route_sim: ModuleType, monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    plot = trace.with_suffix(".svg")
    rows = run(route_sim, monkeypatch, trace, "--plot", str(plot))["rows"]
    svg = ElementTree.parse(plot).getroot()
    texts = [element.text for element in svg.iter(f"{SVG}text")]
    for row in rows:
        assert row["policy"] in texts
        assert f"{row['hit_rate'] * 100:.1f} %" in texts
    curves = [element.attrib["points"] for element in svg.iter(f"{SVG}polyline")]
    assert len(curves) == len(rows)
    for curve in curves:
        points = [tuple(map(float, point.split(","))) for point in curve.split()]
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))
        assert points[-1][1] == _top(svg)


def _top(svg: ElementTree.Element) -> float:
    """Return where 100 % is."""
    return min(float(line.attrib["y1"]) for line in svg.iter(f"{SVG}line"))


def test_a_lone_request_takes_what_the_rates_say(
    route_sim: ModuleType, monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    trace.write_text(json.dumps({"timestamp": 7, "input_length": 1000, "output_length": 11, "hash_ids": [1, 2]}))
    options = ["--prefill-rate", "1000", "--step-ms", "9", "--request-us", "1000", "--policies", "least_loaded"]
    [row] = run(route_sim, monkeypatch, trace, "--transfer-rate", "1e9", "--token-bytes", "1000", *options)["rows"]
    assert row["ttft_p50_ms"] == pytest.approx(1000)
    # Ten tokens of 10 ms, after 1 MB at 1 GB/s.
    assert row["tpot_p50_ms"] == pytest.approx((10 * 10 + 1) / 10)


def test_the_benchmark_of_decisions_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from loadtest.routing import router_bench

    result = tmp_path / "result.json"
    options = ["--pods", "8", "--blocks", "5000", "--decisions", "20", "--lengths", "1500", "--json", str(result)]
    monkeypatch.setattr(sys, "argv", ["router_bench.py", *options])
    router_bench.main()
    rows = json.loads(result.read_text())
    assert rows[0]["entries"] == 5000
    assert rows[1]["p99_ms"] > 0
