"""The alerts: their syntax, when they fire and when not, and their runbooks."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import RULES

RUNBOOKS = Path("k8s/RUNBOOKS.md")
ROOT = RULES.parents[2]


def alerts() -> list[dict[str, Any]]:
    groups = [group for file in sorted(RULES.glob("*.yaml")) for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_syntax(promtool: Path) -> None:
    subprocess.run([promtool, "check", "rules", *RULES.glob("*.yaml")], check=True, timeout=30)


def test_what_fires_when(promtool: Path) -> None:
    cases = Path(__file__).with_name("rules_test.yaml")
    result = subprocess.run([promtool, "test", "rules", cases], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_is_tested() -> None:
    cases = Path(__file__).with_name("rules_test.yaml").read_text()
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
