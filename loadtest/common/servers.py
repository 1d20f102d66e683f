"""The measured servers. Each is started with the command that its users run."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from baton_cli.ports import free_loopback_ports
from loadtest.common.job import Json

HOST = "127.0.0.1"
_START_S = 300.0
_STOP_S = 20.0


@dataclass(frozen=True)
class Kind:
    """The command of a server without --model, --port and flags, and the path that reports that it is ready."""

    command: tuple[str, ...]
    ready: str
    flags: tuple[str, ...] = ()


KINDS = {
    "ours": Kind((sys.executable, "-m", "baton_cli", "up", "--aggregated"), "/ready"),
    "ours-pd": Kind((sys.executable, "-m", "baton_cli", "up"), "/ready"),
    "vllm": Kind(
        (sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        "/health",
        ("--load-format", "dummy", "--disable-uvicorn-access-log"),
    ),
}


class Running:
    """A running command; the context manager ends it and all processes that it started."""

    def __init__(
        self, command: list[str], port: int, ready: str | None, log: Path, environment: dict[str, str]
    ) -> None:
        """ready: the path that is requested until the server answers; None = do not wait.

        Raises RuntimeError, with the end of its log, when the server does not get ready.
        """
        self.port = port
        self._log = log
        began = time.monotonic()
        with log.open("wb") as sink:
            self._process = _start(command, environment, sink)
        try:
            if ready is not None:
                self._wait_until_ready(ready)
        except BaseException:
            self.stop()
            raise
        self.seconds_to_start = time.monotonic() - began

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        # A process that a shell started in the background may ignore SIGINT, and its children inherit that.
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_until_ready(self, path: str) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=2).read()
                return
            except OSError:
                time.sleep(0.2)
        end = self._log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"not ready (exit code {self._process.poll()}): {end}")


class Server(Running):
    """One of the servers of KINDS."""

    def __init__(self, name: str, model: Path, settings: Json, log: Path) -> None:
        """settings: flags by name; both servers use the same names. Raises the errors of Running."""
        kind = KINDS[name]
        [port] = free_loopback_ports(1)
        common = ("--model", str(model), "--served-model-name", "m", "--host", HOST, "--port", str(port))
        # FlashInfer compiles vLLM's sampler at the first use, which fails on a machine without network or compiler.
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        command = [*kind.command, *common, *kind.flags, *as_flags(settings)]
        super().__init__(command, port, kind.ready, log, {**offline, **os.environ})


def _start(command: list[str], environment: dict[str, str], sink: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def as_flags(settings: Json) -> list[str]:
    """Return --name value for each setting; True and False become --name and --no-name."""
    flags: list[str] = []
    for name, value in settings.items():
        kebab = name.replace("_", "-")
        flags += [f"--{kebab}" if value else f"--no-{kebab}"] if isinstance(value, bool) else [f"--{kebab}", str(value)]
    return flags


def setting(text: str) -> tuple[str, Any]:
    """Return key and value of KEY=VALUE, where the value is JSON if it can be."""
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
