"""The alerts: their syntax, when they fire and when not, and their runbooks."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helm.charts import ROOT

from .conftest import rendered_rules, write_rules

RUNBOOKS = Path("k8s/RUNBOOKS.md")
CASES = Path(__file__).with_name("rules_test.yaml")


def alerts() -> list[dict[str, Any]]:
    groups = [group for content in rendered_rules().values() for group in content["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize(
    "values", [{}, {"slo": {"ttftSeconds": 160, "tpotSeconds": 0.0005, "objective": 0.999}}], ids=["defaults", "slo"]
)
def test_syntax(promtool: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    files = write_rules(tmp_path / "rules", **values)
    subprocess.run([promtool, "check", "rules", *files], check=True, timeout=30)


def test_what_fires_when(promtool: Path, tmp_path: Path) -> None:
    write_rules(tmp_path / "rules")
    cases = shutil.copy(CASES, tmp_path)
    result = subprocess.run([promtool, "test", "rules", cases], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_is_tested() -> None:
    cases = CASES.read_text()
    assert [alert["alert"] for alert in alerts() if alert["alert"] not in cases] == []


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_says_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning")
    notes = alert["annotations"]
    assert notes.keys() == {"summary", "description", "runbook_url"}
    path, anchor = notes["runbook_url"].split("#")
    assert path == str(RUNBOOKS)
    sections = re.split(r"^## ", (ROOT / RUNBOOKS).read_text(), flags=re.MULTILINE)[1:]
    [section] = [section for section in sections if section.split("\n")[0].lower() == anchor]
    assert all(f"**{part}.**" in section for part in ("Means", "Look at", "Do"))
