"""Shows how far quantizing is: a bar on a terminal, log lines elsewhere."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from baton_common.logging import configure_logging

log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0


@contextlib.contextmanager
def quantize_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows the current work, its done part and its total on standard error."""
    if not sys.stderr.isatty():
        configure_logging("model")
        yield _LogProgress()
        return
    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        TextColumn("{task.description}", markup=False), *columns, console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda work, done, total: bar.update(task, description=work, completed=done, total=total)


class _LogProgress:
    """Logs the current work, at most every ten seconds."""

    def __init__(self) -> None:
        self._logged = float("-inf")

    def __call__(self, work: str, done: int, total: int) -> None:
        if time.monotonic() - self._logged >= _LOG_INTERVAL_S:
            self._logged = time.monotonic()
            extra = {"event": "quantizing", "done": done, "total": total}
            log.info("%s, %.0f %%", work, 100 * done / max(total, 1), extra=extra)
