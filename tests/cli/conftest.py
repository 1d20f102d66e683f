"""Runs supervisors as separate processes and observes their output."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from baton_cli.ports import free_loopback_ports

SUPERVISE = Path(__file__).with_name("supervise.py")


@pytest.fixture(autouse=True, scope="session")
def interrupts_reach_children() -> None:
    """A script's jobs in the background ignore SIGINT, and so would the processes that tests start from there."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Running:
    """A process whose output is collected line by line, with the time each line came."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(env),
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def when(self, part: str, count: int = 1, timeout: float = 15.0) -> float:
        """Wait until `part` has been printed in `count` lines; returns when the last of them came."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = [at for at, line in self.lines if part in line]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.01)
        raise AssertionError(f"{part!r} not printed {count} times within {timeout} s:\n{self.text}")

    def wait(self, timeout: float = 15.0) -> int:
        """Wait for the end; returns the exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def interrupt(self) -> None:
        """Ctrl-C as a terminal sends it: to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


Start = Callable[..., Running]


@pytest.fixture
def start(processes: None) -> Iterator[Start]:
    """Starts commands. Their remaining processes are killed after the test."""
    started: list[Running] = []

    def launch(*command: str, **env: str) -> Running:
        started.append(Running(command, {**os.environ, **env}))
        return started[-1]

    yield launch
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


@pytest.fixture
def supervise(start: Start) -> Callable[..., Running]:
    """Supervises scripted children: `supervise([[child, ...], ...])`, stages as in Supervisor."""

    def launch(stages: list[list[dict]], level: str = "info") -> Running:
        return start(sys.executable, str(SUPERVISE), json.dumps({"stages": stages, "level": level}))

    return launch


@pytest.fixture
def free_port(processes: None) -> int:
    return free_loopback_ports(1)[0]
