"""Shows the state and output of the supervised processes to the user."""

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton_cli.log_line import LogLevel, LogLine
from baton_cli.state import Phase, State

_PHASE_STYLE = {Phase.READY: "green", Phase.RESTARTING: "red", Phase.STOPPED: "dim"}


class Display(ABC):
    """Shows states, log lines and messages. While its context is open, only the display may write to the terminal."""

    def __init__(self, names: Sequence[str], level: LogLevel) -> None:
        self._width = max(map(len, names))
        self._threshold = level.number

    def log(self, name: str, line: LogLine) -> None:
        """Show a child's line if its level is high enough."""
        if line.level >= self._threshold:
            for part in line.text.splitlines():
                self.say(f"{name:{self._width}} | {part}")

    def started(self) -> None:
        """Hide info lines from now on, because they would bury warnings. With level debug, show all."""
        if self._threshold == logging.INFO:
            self._threshold = logging.WARNING

    @abstractmethod
    def say(self, text: str) -> None:
        """Print text without wrapping it, because it may contain a command to copy."""

    @abstractmethod
    def state(self, name: str, state: State) -> None:
        """Show the new state of a child."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class PlainDisplay(Display):
    """One line per event, for pipes and files."""

    def __init__(self, names: Sequence[str], level: LogLevel, stream: TextIO) -> None:
        super().__init__(names, level)
        self._stream = stream
        self._shown: dict[str, tuple[Phase, int]] = {}

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def state(self, name: str, state: State) -> None:
        # Print only one line for each quarter of the loading progress.
        key = state.phase, (state.percent or 0) // 25
        if self._shown.get(name) != key:
            self._shown[name] = key
            self.say(f"{name:{self._width}}   {state}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class LiveDisplay(Display):
    """Keeps one line per child at the bottom of the terminal. All other text scrolls above."""

    def __init__(self, names: Sequence[str], level: LogLevel, console: Console) -> None:
        super().__init__(names, level)
        self._console = console
        self._states = {name: State(Phase.STARTING) for name in names}
        # Draw only on changes, so that a text selection does not flicker and no refresh thread is needed.
        self._live = Live(self._table(), console=console, auto_refresh=False)

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def state(self, name: str, state: State) -> None:
        self._states[name] = state
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 3))
        for name, state in self._states.items():
            table.add_row(Text(name, "bold"), Text(str(state), _PHASE_STYLE.get(state.phase, "yellow")))
        return table

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()


def display_for(names: Sequence[str], level: LogLevel) -> Display:
    """Return a live display if standard output is a terminal, else a plain one."""
    if sys.stdout.isatty():
        return LiveDisplay(names, level, Console())
    return PlainDisplay(names, level, sys.stdout)
