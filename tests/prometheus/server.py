"""A Prometheus that scrapes a local Baton."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from baton_cli import leash
from baton_cli.ports import free_loopback_ports

READY_S = 20
SCRAPE_S = 1


class Prometheus:
    """A running one."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, path: str, **params: Any) -> Any:
        """Return what its API answers. Fails on a query that is not valid."""
        answer = (await self._http.get(f"/api/v1/{path}", params=params)).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    async def now(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression has now."""
        data = await self.ask("query", query=expression)
        assert data["resultType"] == "vector", expression
        return data["result"]

    async def over(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """Return the series that an expression has between two times, as a panel asks for them."""
        data = await self.ask("query_range", query=expression, start=start, end=end, step=SCRAPE_S)
        assert data["resultType"] == "matrix", expression
        return data["result"]

    async def names(self) -> set[str]:
        """Return the names of all metrics that it has."""
        return set(await self.ask("label/__name__/values"))

    async def exemplars(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """Return the exemplars of all series that an expression is about, between two times."""
        series = await self.ask("query_exemplars", query=expression, start=start, end=end)
        return [exemplar for one in series for exemplar in one["exemplars"]]

    async def until(self, expression: str, timeout_s: float) -> None:
        """Wait until an expression has a result."""
        async with asyncio.timeout(timeout_s):
            while not await self.now(expression):
                await asyncio.sleep(0.3)


@asynccontextmanager
async def prometheus_of(
    program: Path, namespace: str, targets: Mapping[str, Iterable[str]], rules: Iterable[Path], folder: Path
) -> AsyncIterator[Prometheus]:
    """Run Prometheus. namespace: of all targets, as Kubernetes would say. targets: addresses by job.

    folder: for its files.
    """
    [port] = free_loopback_ports(1)
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(addresses), "labels": {"namespace": namespace}}]}
            for job, addresses in targets.items()
        ],
        "rule_files": [str(_without_patience(path, folder)) for path in rules],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = await _start(program, folder, port)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            await _ready(http, process, folder)
            yield Prometheus(http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _start(program: Path, folder: Path, port: int) -> asyncio.subprocess.Process:
    with (folder / "log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid())),
            *(program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"),
            stdout=log,
            stderr=log,
        )


def _without_patience(path: Path, folder: Path) -> Path:
    """Copy rules so that their alerts fire as soon as they are true."""
    content = yaml.safe_load(path.read_text())
    for group in content["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(content))
    return copy


async def _ready(http: httpx.AsyncClient, process: asyncio.subprocess.Process, folder: Path) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            try:
                if (await http.get("/-/ready")).status_code == 200:
                    return
            except httpx.ConnectError:
                assert process.returncode is None, (folder / "log").read_text()
            await asyncio.sleep(0.1)
