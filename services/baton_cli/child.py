"""A supervised process: starts it, reads its output, restarts it when it dies, and stops it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import BinaryIO

from baton_cli import leash
from baton_cli.backoff import Backoff
from baton_cli.display import Display
from baton_cli.errors import BadSetting
from baton_cli.log_line import LogLine
from baton_cli.spec import ChildSpec
from baton_cli.state import Phase, State

_START_ATTEMPTS = 3
_LAST_LINES = 20
_LONGEST_LINE = 1 << 20  # bytes
_PROBE_INTERVAL_S = 0.1
_DRAIN_S = 1.0


class StartFailed(Exception):
    """A child died repeatedly and was never ready. The message contains its last output lines."""


class Child:
    """One child, over all its restarts.

    Its process leads a session of its own, so that a terminal's Ctrl-C reaches only the supervisor, which keeps the
    order of shutdown. When the process ends, the remaining processes of its group are killed.
    """

    def __init__(self, spec: ChildSpec, display: Display, log: BinaryIO | None = None) -> None:
        self.spec = spec
        self.was_ready = asyncio.Event()
        self._display = display
        self._log = log
        self._backoff = Backoff()
        self._stopping = asyncio.Event()
        self._killed = False
        self._finished = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._ready_since: float | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    async def run(self) -> None:
        """Keep the process running until `stop` or `kill`. Raises StartFailed."""
        attempts = 0
        try:
            while not self._stopping.is_set():
                self._show(State(Phase.STARTING))
                status = await self._run_once()
                if self._stopping.is_set():
                    break
                attempts += 1
                self._display.say(f"{self.spec.name} {_ending(status)}")
                if not self.was_ready.is_set() and (attempts == _START_ATTEMPTS or status == BadSetting.exit_code):
                    raise StartFailed(self._failure_report(status, attempts))
                await self._pause()
            self._show(State(Phase.STOPPED))
        finally:
            self._kill_group()
            self._finished.set()

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after the grace period. Return when the process is gone."""
        self._stopping.set()
        if self._process is not None and not self._finished.is_set():
            self._terminate()
            self._show(State(Phase.STOPPING))
        try:
            async with asyncio.timeout(self.spec.grace_s):
                await self._finished.wait()
        except TimeoutError:
            self._display.say(f"{self.spec.name} did not stop within {self.spec.grace_s:g} s: killed")
            self.kill()
            await self._finished.wait()

    def kill(self) -> None:
        """Send SIGKILL at once, and do not restart the process."""
        self._stopping.set()
        self._killed = True
        self._kill_group()

    async def _run_once(self) -> int:
        self._last_lines.clear()
        self._ready_since = None
        async with _pipe() as (output, write_end):
            self._process = await self._spawn(write_end)
            # `stop` or `kill` may have been called while the process was being created.
            if self._killed:
                self._kill_group()
            elif self._stopping.is_set():
                self._terminate()
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read(output))
                probing = group.create_task(self._probe())
                status = await self._process.wait()
                self._kill_group()
                await asyncio.wait({reading}, timeout=_DRAIN_S)
                reading.cancel()
                probing.cancel()
        self._process = None
        return status

    async def _spawn(self, write_end: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *self.spec.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**os.environ, **self.spec.env},
                start_new_session=True,
            )
        finally:
            os.close(write_end)

    async def _read(self, output: asyncio.StreamReader) -> None:
        async for raw in _lines(output):
            if self._log is not None:
                self._log.write(raw + b"\n")
                self._log.flush()
            line = LogLine.parse(raw.decode(errors="replace"))
            if line.event == "loading" and self._ready_since is None:
                self._show(State(Phase.LOADING, percent=line.percent))
            elif line.event == "ready":
                if self.spec.ready_at is None:
                    self._ready()
            else:
                self._last_lines.append(line.text)
                self._display.log(self.spec.name, line)

    async def _probe(self) -> None:
        if self.spec.ready_at is None:
            return
        while self._ready_since is None:
            if await self.spec.ready_at.answers_ready():
                self._ready()
            else:
                await asyncio.sleep(_PROBE_INTERVAL_S)

    def _ready(self) -> None:
        self._ready_since = asyncio.get_running_loop().time()
        self._show(State(Phase.READY))
        self.was_ready.set()

    async def _pause(self) -> None:
        now = asyncio.get_running_loop().time()
        wait_s = self._backoff.after_failure(now - self._ready_since if self._ready_since is not None else 0.0)
        self._show(State(Phase.RESTARTING, wait_s=wait_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()

    def _show(self, state: State) -> None:
        # A "ready" that is shown after Ctrl-C would confuse the user.
        if not self._stopping.is_set() or state.phase in (Phase.STOPPING, Phase.STOPPED):
            self._display.state(self.spec.name, state)

    def _terminate(self) -> None:
        # Signal only the process, not its group, because it stops its own children in its own order.
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def _kill_group(self) -> None:
        if self._process is not None:
            # macOS answers EPERM for a group of zombies.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _failure_report(self, status: int, attempts: int) -> str:
        times = f"{attempts} times in a row" if attempts > 1 else "with a setting it cannot use"
        last = "\n".join(f"  {line}" for line in self._last_lines)
        return f"{self.spec.name} failed to start {times}: it {_ending(status)}. Its last lines:\n{last}"


def _ending(status: int) -> str:
    return f"exited with code {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"


@contextlib.asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """Yield a stream and the descriptor that feeds it, which the caller closes.

    With asyncio's own pipe to a process, wait() would hang while grandchildren hold the other end open.
    """
    read_end, write_end = os.pipe()
    output = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb", buffering=0)
    )
    try:
        yield output, write_end
    finally:
        transport.close()


async def _lines(output: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream. The last one may lack a newline. Lines above the length limit are split."""
    rest = b""
    while chunk := await output.read(1 << 16):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > _LONGEST_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest
