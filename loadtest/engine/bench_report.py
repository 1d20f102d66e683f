"""The report of the benchmark, a file that is rewritten after every event."""

import importlib.metadata
import json
import platform
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path

from loadtest.common.bench_table import figure
from loadtest.common.job import Json
from loadtest.engine.device import Card
from loadtest.engine.engines import ENGINES
from loadtest.engine.rows import times_better


class Report:
    """json: the content of the file."""

    def __init__(self, path: Path, asked: Json) -> None:
        self._path = path
        packages = ("torch", "triton", "vllm", "transformers")
        self.json: Json = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [Path(sys.executable).name, *sys.argv],
            **asked,
            "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
            "shapes": {},
        }

    def add_shape(self, name: str) -> Json:
        entry: Json = {"rows": {}, "errors": {}, "settings": {}, "start_s": {}, "profile": [], "warnings": []}
        self.json["shapes"][name] = entry
        return entry

    def note(self, event: Json, source: str, entry: Json) -> str:
        """Put an event of a task into the entry of a shape and return a line about it. source: an engine or a task."""
        line = self._note(event, source, entry)
        write_json(self._path, self.json)
        return line

    def _note(self, event: Json, source: str, entry: Json) -> str:
        match event["event"]:
            case "card":
                self.json["card"] = event["card"]
                return f"{event['card']['name']}: {Card(**event['card']['measured'])}"
            case "weights":
                return f"random weights made in {event['seconds']:.1f} s"
            case "ready":
                entry["settings"][source] = event["settings"]
                entry["start_s"][source] = event["seconds"]
                return "ready"
            case "profile":
                entry["profile"].append(event["report"])
                return str(event["report"]["name"])
            case "warning":
                entry["warnings"].append(event["text"])
                return f"warning: {event['text']}"
            case "error":
                # The first error gives the cause; a later one only says that the process ended.
                entry["errors"].setdefault(source, event["error"])
                entry.setdefault("logs", {})[source] = event["log"]
                return f"failed: {event['error']}"
        return _note_row(event, source, entry)

    @property
    def good(self) -> bool:
        return not any(entry["errors"] for entry in self.json["shapes"].values())


def _note_row(event: Json, engine: str, entry: Json) -> str:
    row = entry["rows"][event["key"]]
    if "error" in event:
        row[engine] = {"error": event["error"]}
        entry["errors"].setdefault(engine, f"{event['key']}: {event['error']}")
        return f"{row['name']}: failed: {event['error']}"
    row[engine] = {"samples": event["samples"], "median": statistics.median(event["samples"])}
    row["ratio"] = _ratios(row)
    return f"{row['name']}: {figure(row[engine]['median'])} {row['unit']}"


def _ratios(row: Json) -> dict[str, float]:
    """Return the ratio of Baton to each other engine; above 1, Baton is better."""
    medians = {name: row[name]["median"] for name in ENGINES if "median" in row.get(name, {})}
    ours = medians.pop("ours", None)
    return {name: times_better(row["unit"], ours, other) for name, other in medians.items()} if ours else {}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_json(path: Path, value: Json) -> None:
    """Replace a file atomically, so that readers never see a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1))
    partial.replace(path)
