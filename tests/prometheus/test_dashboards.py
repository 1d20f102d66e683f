"""The dashboards are those that the code makes, and are complete."""

import pytest

from helm.dashboards.all import BOARDS
from helm.dashboards.board import Board

from .conftest import DASHBOARDS
from .grafana import Dashboard


def test_the_files_are_up_to_date() -> None:
    files = {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    assert files == {f"{board.name}.json": board.to_json() for board in BOARDS}, "`make dashboards` writes them"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_all_is_said(board: Board) -> None:
    dashboard = Dashboard(DASHBOARDS / f"{board.name}.json")
    for panel in dashboard.panels:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        if panel["type"] == "heatmap":
            assert panel["options"]["yAxis"]["unit"]
        else:
            assert panel["fieldConfig"]["defaults"]["unit"]
        assert len(panel["targets"]) == 1 or all(target["legendFormat"] for target in panel["targets"])
    # Neither a variable that changes nothing, nor a name that is none.
    assert dashboard.used() == dashboard.variables.keys() - {"datasource"}


def test_panels_of_first_tokens_have_exemplars_once() -> None:
    for board in BOARDS:
        for panel in Dashboard(DASHBOARDS / f"{board.name}.json").panels:
            shown = [target["expr"] for target in panel["targets"] if target.get("exemplar")]
            drawn = panel["type"] == "heatmap" or panel["fieldConfig"]["defaults"]["unit"] == "s"
            of_first_tokens = "time_to_first_token_seconds_bucket" in panel["targets"][0]["expr"]
            assert len(shown) == (drawn and of_first_tokens and panel["type"] != "stat"), panel["title"]


def test_no_two_panels_overlap() -> None:
    for board in BOARDS:
        cells = [
            (x, y)
            for panel in Dashboard(DASHBOARDS / f"{board.name}.json").panels
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]
        assert len(cells) == len(set(cells)), board.name
        assert max(x for x, _ in cells) < 24
