"""Shows the download of a model: a bar on a terminal, log lines elsewhere."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from baton_common.logging import configure_logging
from baton_hub.cache import size_text

if TYPE_CHECKING:
    from baton_hub.pull import Progress as PullProgress

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0


class LogProgress:
    """Logs the progress of the download at most every ten seconds, and its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._done = 0
        self._total = 0
        self._logged = time.monotonic()

    def expect(self, count: int) -> None:
        with self._lock:
            self._total += count

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            due = time.monotonic() - self._logged >= _LOG_INTERVAL_S
            if due:
                self._logged = time.monotonic()
        if due:
            self._log("downloading")

    def say(self, text: str) -> None:
        log.info("%s", text)

    def finished(self) -> None:
        self._log("downloaded")

    def _log(self, event: str) -> None:
        extra = {"event": event, "done": self._done, "total": self._total}
        log.info("%s: %s of %s", self._name, size_text(self._done), size_text(self._total), extra=extra)


class BarProgress:
    """Draws a bar with bytes, speed and remaining time, which disappears at the end."""

    def __init__(self, bar: Progress, name: str) -> None:
        self._bar = bar
        self._task = bar.add_task(name, total=0)
        self._lock = threading.Lock()
        self._total = 0

    def expect(self, count: int) -> None:
        with self._lock:
            self._total += count
            self._bar.update(self._task, total=self._total)

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def pull_progress(name: str) -> Iterator["PullProgress"]:
    """Show a download on standard error. name: of the model."""
    if sys.stderr.isatty():
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(
            TextColumn("{task.description}", markup=False), *columns, console=Console(stderr=True), transient=True
        ) as bar:
            yield BarProgress(bar, name)
    else:
        configure_logging("model")
        # The library under the hub's client logs each request.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        progress = LogProgress(name)
        yield progress
        progress.finished()
