"""Gives every test exactly one of the markers `unit`, `processes` and `soak`, and enforces `unit`.

A test is `unit` unless something says otherwise: it then starts no process and opens no socket, and fails if it does.
Where there is a GPU, this is not checked.
A test is `processes` when its folder is in `_FOLDERS`, when a fixture that it uses requests the fixture `processes`,
or when it is marked so itself. Tests whose size `make soak`, `make fuzz` and `make chaos` set are marked `soak`; these
targets run no others.
"""

import sys
import threading
from collections.abc import Callable, Generator
from functools import wraps
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest
import torch

_MARKERS: Final = ("unit", "processes", "soak")

# Folders in which every test needs running processes.
_FOLDERS: Final = ("chaos", "clients", "e2e", "fuzz_peers", "ingress", "prometheus")

# Python raises these audit events, whichever library asks it for a socket or a process. Event loops and in-process
# channels use pairs of sockets, which are neither bound nor connected.
_EVENTS: Final = {
    "os.exec": "start a process",
    "os.fork": "start a process",
    "os.forkpty": "start a process",
    "os.posix_spawn": "start a process",
    "os.system": "start a process",
    "subprocess.Popen": "start a process",
    "socket.bind": "bind a socket",
    "socket.connect": "connect a socket",
    "socket.sendmsg": "send from a socket",
    "socket.sendto": "send from a socket",
}


@pytest.fixture(scope="session")
def processes() -> None:
    """A fixture that starts a process or opens a socket requests this one. Tests that use it are marked `processes`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raises pytest.UsageError for a test that is marked with two of the three."""
    for item in items:
        given = sorted({marker.name for marker in item.iter_markers()} & set(_MARKERS))
        if len(given) > 1:
            raise pytest.UsageError(f"{item.nodeid} is marked {' and '.join(given)}; a test has one of these markers")
        if not given:
            item.add_marker("processes" if _needs_processes(item) else "unit")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare `-m unit` the imports of folders that have no unit test."""
    without = config.option.markexpr == "unit" and collection_path.parent == Path(__file__).parent
    return True if without and collection_path.name in _FOLDERS else None


def _needs_processes(item: pytest.Item) -> bool:
    in_folder = any(item.path.is_relative_to(Path(__file__).with_name(folder)) for folder in _FOLDERS)
    return in_folder or "processes" in getattr(item, "fixturenames", ())


class NotAUnitTestError(RuntimeError):
    """A test that is marked `unit` starts a process or opens a socket."""


class _Guard:
    """Raises where a unit test starts a process or opens a socket, and fails the test if it catches that."""

    def __init__(self) -> None:
        self._test: str | None = None
        self._caught: NotAUnitTestError | None = None
        self._threads_before: set[int | None] = set()
        sys.addaudithook(self._audit)
        # gRPC opens its sockets in C, where Python has no audit events.
        for module in (grpc, grpc.aio):
            for name in ("server", "insecure_channel", "secure_channel"):
                setattr(module, name, self._refused(getattr(module, name), f"open a gRPC {name.replace('_', ' ')}"))

    def over(self, item: pytest.Item) -> Generator[None]:
        """Watch one phase of a test."""
        # Triton compiles for a GPU with processes of its own, whichever test launches a kernel first.
        if item.get_closest_marker("unit") is None or torch.cuda.is_available():
            return (yield)
        self._threads_before = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        self._test, self._caught = item.nodeid, None
        try:
            return (yield)
        finally:
            self._test = None
            if self._caught is not None:  # which the test, or what it calls, may have caught
                raise self._caught

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._test is not None and event in _EVENTS:
            self._refuse(f"{_EVENTS[event]} ({event}{args!r:.200})")

    def _refused(self, open_: Callable[..., Any], what: str) -> Callable[..., Any]:
        @wraps(open_)
        def guarded(*args: Any, **options: Any) -> Any:
            self._refuse(what)
            return open_(*args, **options)

        return guarded

    def _refuse(self, what: str) -> None:
        """Threads that are older than the test belong to fixtures that tests share, and may do as they like."""
        if self._test is None or threading.get_ident() in self._threads_before:
            return
        self._caught = NotAUnitTestError(
            f"{self._test} is a unit test and would {what}. Mark it `@pytest.mark.processes`, or, if a fixture does "
            "this, let the fixture request the fixture `processes` (tests/markers.py)."
        )
        raise self._caught


_GUARD: Final = _Guard()


# Not the teardown, since that of the last test of a module ends the fixtures of others as well.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    return (yield from _GUARD.over(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    return (yield from _GUARD.over(item))
