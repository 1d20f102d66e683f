"""Parses one output line of a child."""

import json
import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_ENVELOPE = frozenset({"time", "level", "service", "message", "event", "done", "total", "exception"})


class LogLevel(StrEnum):
    """The levels of baton_common.logging."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        return logging.getLevelNamesMapping()[self.upper()]


@dataclass(frozen=True)
class LogLine:
    """One output line of a child. level: a level of `logging`. text: for the user. event: the line's machine-readable
    event, if any. percent: the loading progress, if the event is `loading`."""

    level: int
    text: str
    event: str | None = None
    percent: int | None = None

    @classmethod
    def parse(cls, raw: str) -> "LogLine":
        """Parse a JSON log line. Any other line, such as one of a traceback, counts as a warning."""
        try:
            entry = json.loads(raw)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            return cls(logging.WARNING, raw)
        level = str(entry.get("level", "info"))
        return cls(
            level=logging.getLevelNamesMapping().get(level.upper(), logging.WARNING),
            text=f"{level}: {_text(entry)}",
            event=entry.get("event"),
            percent=_percent(entry),
        )


def _text(entry: dict[str, Any]) -> str:
    extras = "".join(f" {key}={value}" for key, value in entry.items() if key not in _ENVELOPE)
    exception = f"\n{entry['exception']}" if "exception" in entry else ""
    return f"{entry.get('message', '')}{extras}{exception}"


def _percent(entry: dict[str, Any]) -> int | None:
    done, total = entry.get("done"), entry.get("total")
    if not isinstance(done, int | float) or not isinstance(total, int | float) or total <= 0:
        return None
    return int(100 * done / total)
