"""A Baton with the demo model, as `baton up` starts it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import requests

MODEL_NAME = "model"
READY_S = 90
END_S = 30


@contextlib.contextmanager
def local_baton(command: str, **env: str) -> Iterator[str]:
    """Run `baton up` until it is ready; yields the address of its gateway, and fails when a process was lost.

    env: further environment variables.
    """
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [command, "up", "--port", str(port), "--served-model-name", MODEL_NAME, "--log-level", "error"],
        stdout=sys.stderr,
        env={**os.environ, "BATON_NUM_THREADS": "1", **env},
        start_new_session=True,
    )
    try:
        _wait(process, address)
        yield address
        if process.poll() is not None:
            raise RuntimeError(f"baton up has ended by itself, with exit code {process.returncode}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _wait(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"baton up ended with exit code {process.returncode}")
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"{address}/ready", timeout=5).ok:
                return
        time.sleep(0.2)
    raise RuntimeError(f"baton up was not ready within {READY_S} s")
