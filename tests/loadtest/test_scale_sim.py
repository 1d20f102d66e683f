"""The simulator of scaling, and what the controller's policy does in it."""

import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

# A pod computes three such prompts a second; KV of twenty requests fits on a decode pod.
PODS = ["--prefill-rate", "3000", "--blocks", "60", "--no-local-prefill"]
SECONDS = 2400


@pytest.fixture
def scale_sim() -> ModuleType:
    from loadtest.scaling import scale_sim

    return scale_sim


@pytest.mark.parametrize("rate", [1.5, 4, 7, 10])
def test_a_constant_load_is_settled_for_good(scale_sim: ModuleType, rate: float) -> None:
    arguments = scale_sim.parser().parse_args(PODS)
    requests = scale_sim.constant(rate, SECONDS, output=30)
    result = scale_sim.Replay(arguments, scale_sim.scalers(arguments)["controller"]).run(requests)
    settled = [sizes for time, *sizes in result.samples if time > SECONDS / 2]
    assert sum(before != after for before, after in itertools.pairwise(settled)) <= 1
    late = result.served.ttft[len(requests) // 2 :]
    assert sum(ttft <= arguments.ttft_slo for ttft in late) > 0.9 * len(late)
    # It has neither stayed with what was there at first nor taken all there is.
    prefill, decode = settled[-1]
    assert rate / 3 < prefill < rate / 3 + 4
    assert decode <= 8


def test_all_scalers_on_a_trace(scale_sim: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace, result, image = tmp_path / "trace.csv", tmp_path / "result.json", tmp_path / "pods.svg"
    rows = [f"2023-11-16 18:{i // 60 % 60:02}:{i % 60:02}.9799600,{1000 + i},{i % 40}" for i in range(900)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    options = ["--copies", "4", "--fixed", "1:1", "6:6", "--json", str(result), "--svg", str(image), *PODS]
    monkeypatch.setattr(sys, "argv", ["scale_sim.py", str(trace), *options])
    scale_sim.main()
    found = {row["scaler"]: row for row in json.loads(result.read_text())["rows"]}
    assert list(found) == ["controller", "hpa", "fixed 1:1", "fixed 6:6"]
    assert found["fixed 1:1"]["ttft_attained"] < 0.5
    assert found["fixed 6:6"]["ttft_attained"] > 0.95
    assert found["fixed 6:6"]["pod_hours"] == pytest.approx(12 * 900 / 3600, rel=0.05)
    assert found["fixed 6:6"]["changes"] == 0
    assert found["controller"]["ttft_attained"] > 2 * found["fixed 1:1"]["ttft_attained"]
    assert ElementTree.fromstring(image.read_text()).tag.endswith("svg")
