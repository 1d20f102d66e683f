"""A process under test and what it writes."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from baton_cli import leash

Line = dict[str, Any]


class Process:
    """A `baton` command in a session of its own. It and all that it starts end with the tests, whatever happens."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.lines: list[Line] = []
        self._process = process
        self._news = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, *args: str, env: dict[str, str] | None = None) -> "Process":
        """Run `baton` with these arguments."""
        command = (sys.executable, "-m", "baton_cli", *args)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            limit=1 << 20,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def wrote(self, matches: Callable[[Line], bool], timeout_s: float = 60, after: int = 0) -> Line:
        """Wait for a line, of those from index `after` on."""

        def found() -> Line | None:
            return next((line for line in self.lines[after:] if matches(line)), None)

        try:
            async with asyncio.timeout(timeout_s), self._news:
                while (line := found()) is None:
                    assert not self._reading.done(), f"the process has ended: {self.lines[-20:]}"
                    await self._news.wait()
        except TimeoutError:
            raise TimeoutError(f"the process wrote no such line: {self.lines[-20:]}") from None
        return line

    async def logged(self, event: str, timeout_s: float = 60) -> Line:
        """Wait for a log line with this event."""
        return await self.wrote(lambda line: line.get("event") == event, timeout_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        self._process.send_signal(number)

    def send_to_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and what it has started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def ended(self, timeout_s: float = 30) -> int:
        """Wait for the end; return the exit code."""
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    async def kill(self) -> None:
        self.send_to_group(signal.SIGKILL)
        await self.ended()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            async with self._news:
                self.lines.append(_parse(raw.decode(errors="replace").rstrip("\n")))
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()


def _parse(raw: str) -> Line:
    with contextlib.suppress(ValueError):
        entry = json.loads(raw)
        if isinstance(entry, dict):
            return entry
    return {"message": raw}
