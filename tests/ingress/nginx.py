"""nginx as an ingress, in front of a gateway."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from baton_cli import leash
from baton_cli.ports import free_loopback_ports

READY_S = 10
TEMPLATE = Path(__file__).with_name("nginx.conf.in")


@dataclass(frozen=True)
class Nginx:
    """A running nginx."""

    url: str
    folder: Path

    def log(self) -> list[tuple[int, str]]:
        """Return the status and the request id of each request that has ended."""
        lines = (self.folder / "access.log").read_text().splitlines()
        return [(int(status), request_id) for status, request_id in (line.split() for line in lines)]


@asynccontextmanager
async def nginx_before(program: Path, port: int, folder: Path, *, gathering: bool = False) -> AsyncIterator[Nginx]:
    """Run nginx in front of the gateway at a port of this machine. folder: for its files, empty.

    gathering: with gzip and proxy_buffering, which together hold back what an answer does not ask to pass on at once.
    """
    [own] = free_loopback_ports(1)
    values = {"PORT": own, "UPSTREAM": port, "FOLDER": folder}
    values |= dict.fromkeys(("GZIP", "BUFFERING"), "on" if gathering else "off")
    text = TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    (folder / "nginx.conf").write_text(text)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid())),
        *(program, "-p", folder, "-e", folder / "error.log", "-c", folder / "nginx.conf"),
    )
    try:
        nginx = Nginx(f"http://127.0.0.1:{own}", folder)
        await _answers(nginx, process)
        yield nginx
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answers(nginx: Nginx, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(READY_S), httpx.AsyncClient(base_url=nginx.url) as http:
        while True:
            try:
                await http.get("/health")
                return
            except httpx.ConnectError:
                assert process.returncode is None, (nginx.folder / "error.log").read_text()
                await asyncio.sleep(0.05)
