"""The files of a report are written whatever ends the run, or fails after it."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from baton_bench import main as bench_main
from baton_bench import report as bench_report
from baton_bench.dialect import Dialect
from baton_bench.errors import BenchError
from baton_bench.load import LoadResult
from baton_bench.plan import Plan, Session, Turn
from baton_bench.report import Report
from baton_bench.settings import BenchSettings
from baton_bench.target import Target

from .test_summary import answered

pytestmark = pytest.mark.processes  # `main` runs an event loop, which opens sockets


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchSettings:
    async def measure(report: Report, say: Any) -> None:
        answer = answered(0, 0.1, 0.02, 11)
        plan = Plan("load", 6.0, [Session(answer.due, [Turn([1], 1)])])
        endpoint: Any = None
        dialect = Dialect("m", "tokens", True, True, 1.0)
        report.targets = [Target("target", "http://gone", endpoint, dialect, None, None, True)]
        report.results.append(LoadResult("target", plan, [answer]))
        raise BenchError("the second target is gone")

    monkeypatch.setattr(bench_main, "measure", measure)
    return BenchSettings(json_file=tmp_path / "out.json", html_file=tmp_path / "out.html")


def test_what_was_measured_before_an_error_is_written(settings: BenchSettings) -> None:
    with pytest.raises(BenchError, match="the second target is gone"):
        bench_main.main(settings)
    assert settings.json_file is not None
    assert settings.html_file is not None
    assert json.loads(settings.json_file.read_text())["results"][0]["target"] == "target"
    assert "baton bench serve" in settings.html_file.read_text()


def test_a_report_needs_no_installed_baton_and_no_terminal(
    settings: BenchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    def broken(report: Report) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(bench_report, "version", absent)
    monkeypatch.setattr(bench_main, "console_table", broken)
    with pytest.raises(BrokenPipeError):
        bench_main.main(settings)
    assert settings.json_file is not None
    assert json.loads(settings.json_file.read_text())["baton"] is None
