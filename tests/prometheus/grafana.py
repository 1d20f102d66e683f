"""Dashboards, as Grafana would use them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What Grafana itself knows.
BUILT_IN = {"__rate_interval": "10s", "__range": "60s"}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Question:
    """A query of a panel."""

    panel: str
    legend: str
    expression: str


class Dashboard:
    """Read from a file."""

    def __init__(self, path: Path) -> None:
        self._content: dict[str, Any] = json.loads(path.read_text())

    @property
    def panels(self) -> list[dict[str, Any]]:
        return [panel for panel in self._content["panels"] if panel["type"] != "row"]

    @property
    def variables(self) -> dict[str, dict[str, Any]]:
        return {variable["name"]: variable for variable in self._content["templating"]["list"]}

    @property
    def text(self) -> str:
        return json.dumps(self._content)

    def used(self) -> set[str]:
        """Return the variables that something refers to."""
        found = _VARIABLE.findall("\n".join([question.expression for question in self.raw()]))
        return {braced or plain for braced, plain in found} - BUILT_IN.keys()

    def raw(self) -> Iterator[Question]:
        for panel in self.panels:
            for target in panel["targets"]:
                yield Question(panel["title"], target.get("legendFormat", ""), target["expr"])

    def questions(self, **chosen: str) -> Iterator[Question]:
        """Return the queries with variables filled in. chosen: the values of some; the others stay as they begin."""
        values = {**BUILT_IN, **{name: _begins(variable) for name, variable in self.variables.items()}, **chosen}
        for question in self.raw():
            expression = _VARIABLE.sub(lambda match: values[match[1] or match[2]], question.expression)
            yield Question(question.panel, question.legend, expression)


def _begins(variable: dict[str, Any]) -> str:
    if variable["type"] == "datasource":
        return "prometheus"
    value: str = variable["current"]["value"]
    return variable["allValue"] if value == "$__all" else value
