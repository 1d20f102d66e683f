"""Workers and gateways of one machine, each a process of its own with a log, as a chart would lay them out."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import torch

from baton_cli.ports import free_loopback_ports
from loadtest.common.servers import HOST

_START_S = 300.0
_STOP_S = 15.0


class Pods:
    """A context manager that ends what was started. Logs are NAME.log in a folder."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._gateways: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, service: str, flags: list[str], gpus: str = "", name: str = "") -> int:
        """Start a gateway or a worker on a port of its own, and return the port.

        gpus: the GPUs that it sees, its own first. NCCL copies to a GPU only if the process sees it. name: of the log.
        """
        [port] = free_loopback_ports(1)
        command = [sys.executable, "-m", "baton_cli", service, "--model", str(self._model)]
        command += ["--served-model-name", "m", "--host", HOST, "--port", str(port), *flags]
        with (self._folder / f"{name or service}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
                start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        if service == "gateway":
            self._gateways.append(port)
        return port

    def wait_until_ready(self, paired: Iterable[str] = (), pairs: int = 1) -> None:
        """Wait for all gateways, and for decode pods of these names to have so many connections of GPUs each.

        Raises RuntimeError, with the ends of the logs, when they do not get ready.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and all(process.poll() is None for process in self._processes):
            with contextlib.suppress(OSError):
                for port in self._gateways:
                    urllib.request.urlopen(f"http://{HOST}:{port}/ready", timeout=2).read()
                if all(len(self.events(name, "paired", "transport_fallback")) >= pairs for name in paired):
                    return
            time.sleep(0.2)
        ends = (f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self._folder.glob("*.log"))
        raise RuntimeError("not ready:\n" + "\n".join(ends))

    def events(self, name: str, *events: str) -> list[dict[str, Any]]:
        """Return the log lines of a process that report one of these events."""
        # The process may still be writing the last line.
        lines = (self._folder / f"{name}.log").read_text(errors="replace").split("\n")[:-1]
        parsed = (json.loads(line) for line in lines if line.startswith("{") and '"event"' in line)
        return [line for line in parsed if line["event"] in events]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def gpus_from(first: int) -> str:
    """Return CUDA_VISIBLE_DEVICES of a pod whose own GPUs begin with this one. It sees all that this process sees."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    return ",".join(visible[first:] + visible[:first])


def seconds_between(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the time from one log line to another."""
    begun, ended = (datetime.fromisoformat(line["time"]) for line in (first, second))
    return (ended - begun).total_seconds()
