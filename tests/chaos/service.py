"""A `baton` process that writes into a file."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton_cli import leash

Line = dict[str, Any]


class Service:
    """The process has a session of its own. It and all that it starts end with the tests, whatever happens."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, output: Path, name: str, settings: Mapping[str, object], prefix: Sequence[str] = ()
    ) -> "Service":
        """Run `baton NAME`. output: what it writes is added there. settings: by field name. prefix: runs a command."""
        flags = [part for field, value in settings.items() for part in (f"--{field.replace('_', '-')}", str(value))]
        command = (*prefix, sys.executable, "-m", "baton_cli", name, *flags)
        with output.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return cls(process)

    @property
    def pid(self) -> int:
        """Of the process, and of its session and process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def send_to_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and what it has started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def ended(self) -> int:
        """Wait for the end; return the exit code."""
        return await self._process.wait()

    async def kill(self) -> None:
        self.send_to_group(signal.SIGKILL)
        await self.ended()


def is_error(line: Line) -> bool:
    """Whether a line was logged at level error, or begins what Python writes when all else has failed."""
    unformatted = "level" not in line and str(line["message"]).startswith(("Traceback", "Fatal Python error"))
    return unformatted or line.get("level") in ("error", "critical")


def read_log(output: Path) -> Iterator[Line]:
    """Yield the lines of a service's output; one that is no log line is a message without a level."""
    for raw in output.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(raw)
        except ValueError:
            entry = None
        yield entry if isinstance(entry, dict) else {"message": raw}
