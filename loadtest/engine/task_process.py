"""A task in its own process, so that its device memory is freed when it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TextIO

from loadtest.common.job import Job, Json

LOG_CHARACTERS = 4000


def run_task(job: Job, timeout: float) -> Generator[Json]:
    """Run a task for at most `timeout` seconds and yield its events.

    An event of the kind "error" has the end of what the process printed as its "log".
    """
    with tempfile.TemporaryDirectory() as name:
        job_file, events, log = (Path(name, file) for file in ("job.json", "events.jsonl", "log"))
        job.save(job_file)
        events.touch()
        command = [sys.executable, str(Path(__file__).with_name("tasks.py")), str(job_file), str(events)]
        with log.open("w") as sink, events.open() as source:
            # The task gets its own process group, so that its child processes end with it.
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                for event in _follow(process, source, timeout):
                    if event["event"] == "error":
                        event["log"] = log.read_text(errors="replace")[-LOG_CHARACTERS:]
                    yield event
            finally:
                _end(process)


def _follow(process: subprocess.Popen[bytes], source: TextIO, timeout: float) -> Iterator[Json]:
    deadline = time.monotonic() + timeout
    while True:
        over = process.poll() is not None
        yield from map(json.loads, _whole_lines(source))
        if over:
            break
        if time.monotonic() > deadline:
            yield {"event": "error", "error": f"not done after {timeout:.0f} s"}
            return
        time.sleep(0.05)
    if process.returncode:
        yield {"event": "error", "error": f"exit code {process.returncode}"}


def _whole_lines(source: TextIO) -> Iterator[str]:
    """Yield the lines that are complete so far."""
    while True:
        at = source.tell()
        line = source.readline()
        if not line.endswith("\n"):
            source.seek(at)
            return
        yield line


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children if they still run, and wait briefly until their memory is free."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(50):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    process.wait()
