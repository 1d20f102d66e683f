"""Parsing lines of children: JSON lines of the services' logging, and any other text."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_cli.log_line import LogLine
from baton_common.logging import JsonFormatter


def test_reads_what_the_services_write() -> None:
    record = logging.makeLogRecord(
        {"levelno": logging.WARNING, "levelname": "WARNING", "msg": "pod lost", "pod": "a:1", "tries": 3}
    )
    line = LogLine.parse(JsonFormatter("gateway").format(record))
    assert line == LogLine(logging.WARNING, "warning: pod lost pod=a:1 tries=3")


def test_an_exception_follows_on_lines_of_its_own() -> None:
    line = LogLine.parse('{"level": "error", "message": "broke", "exception": "Traceback\\nValueError"}')
    assert line.level == logging.ERROR
    assert line.text == "error: broke\nTraceback\nValueError"


@pytest.mark.parametrize(
    ("raw", "percent"),
    [
        ('{"event": "loading", "done": 45, "total": 100}', 45),
        ('{"event": "loading", "done": 1, "total": 3}', 33),
        ('{"event": "loading", "done": 0, "total": 0}', None),
        ('{"event": "loading", "done": "a", "total": 3}', None),
        ('{"event": "loading"}', None),
    ],
)
def test_progress(raw: str, percent: int | None) -> None:
    line = LogLine.parse(raw)
    assert (line.event, line.percent) == ("loading", percent)


@given(st.one_of(st.text(), st.recursive(st.none() | st.integers(), st.lists).map(str)))
def test_any_other_line_is_shown_as_it_is(raw: str) -> None:
    line = LogLine.parse(raw)
    assert line == LogLine(logging.WARNING, raw)


@given(st.dictionaries(st.sampled_from(["level", "message", "event", "done", "total", "x"]), st.integers() | st.text()))
def test_no_object_breaks_the_reader(entry: dict) -> None:
    line = LogLine.parse(json.dumps(entry))
    assert line.text.startswith(str(entry.get("level", "info")))
