"""Writes all dashboards."""

from pathlib import Path

from .all import BOARDS

CHART = Path(__file__).parents[1] / "baton" / "dashboards"

for board in BOARDS:
    (CHART / f"{board.name}.json").write_text(board.to_json())
