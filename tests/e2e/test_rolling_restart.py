"""Three gateways behind a Service are restarted one after the other, and no client notices.

`ROLLING_REQUESTS=5000` sends that many requests, and restarts for as long as that takes.
"""

import asyncio
import http.client
import itertools
import json
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

from baton_cli.ports import free_loopback_ports
from tests.gateway.fake_worker import FakePod, Job, say
from tests.gateway.tiny_models import byte_level_tokenizer, write_model

from .process import Process
from .service import Service

REQUESTS = int(os.environ.get("ROLLING_REQUESTS", "600"))
GATEWAYS = 3
CLIENTS = 6
LAG_S = 1.0  # of the endpoints, behind readiness
DRAIN_DELAY_S = 2.5
READY_S = 60
TOKEN_S = 0.002


class Clients:
    """Clients that keep their connections, and neither try again nor look whether a connection still lives."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._numbers = itertools.count(1)
        self.enough = threading.Event()
        self.sent = 0
        self.outcomes: Counter[str] = Counter()

    def run(self, seed: int) -> None:
        pauses = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        while not self.enough.is_set():
            self.sent = number = next(self._numbers)
            outcome = _ask(connection, stream=number % 2 == 0)
            self.outcomes[outcome] += 1
            if outcome != "answered":
                connection.close()
            # Now and then a connection is left alone for a second.
            self.enough.wait(1.0 if pauses.random() < 0.01 else pauses.uniform(0, 0.02))
        connection.close()


def _ask(connection: http.client.HTTPConnection, stream: bool) -> str:
    body = json.dumps({"model": "tiny", "prompt": "hello", "stream": stream})
    try:
        connection.request("POST", "/v1/completions", body)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    whole = text.endswith(b"data: [DONE]\n\n") if stream else b'"finish_reason":"stop"' in text
    return "answered" if answer.status == 200 and whole else f"{answer.status} {text[-100:]!r}"


class Gateway:
    """One place of the rolling restart: a port, and the process that listens there now."""

    def __init__(self, model: Path, pod: FakePod, service: Service) -> None:
        self.port, self.admin_port = free_loopback_ports(2)
        self._flags = [
            *("--model", str(model), "--served-model-name", "tiny", "--decode-addresses", pod.address),
            *("--host", "127.0.0.1", "--port", str(self.port), "--admin-port", str(self.admin_port)),
            *("--drain-delay-s", str(DRAIN_DELAY_S), "--shutdown-grace-s", "10", "--log-level", "warning"),
        ]
        self._service = service
        self._process: Process | None = None
        self._followed: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._process = await Process.start("gateway", *self._flags)
        self._followed = asyncio.create_task(self._service.follow(self.port, self.admin_port))
        async with asyncio.timeout(READY_S):
            while not self._service.serves(self.port):
                assert self._process.alive, self._process.lines
                await asyncio.sleep(0.05)

    async def restart(self) -> None:
        assert self._process is not None
        assert self._followed is not None
        self._process.send(signal.SIGTERM)
        assert await self._process.ended() == 0
        await self._followed
        await self.start()

    async def kill(self) -> None:
        if self._process is not None:
            await self._process.kill()
        if self._followed is not None:
            self._followed.cancel()


async def speak(job: Job) -> None:
    """Say four tokens, a little apart."""
    for token in job.prompt[:1] * 3:
        await job.send(job.delta([token]))
        await asyncio.sleep(TOKEN_S)
    await say(job.prompt[:1])(job)


@pytest.mark.timeout(600)
async def test_a_rolling_restart_loses_no_request(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", byte_level_tokenizer())
    pod = await FakePod().start()
    pod.script = speak
    async with Service(LAG_S).running() as service:
        gateways = [Gateway(model, pod, service) for _ in range(GATEWAYS)]
        clients = Clients(service.port)
        asking: list[asyncio.Future[None]] = []
        restarts = 0
        try:
            await asyncio.gather(*(gateway.start() for gateway in gateways))
            asking = [asyncio.ensure_future(asyncio.to_thread(clients.run, seed)) for seed in range(CLIENTS)]
            for gateway in itertools.cycle(gateways):
                if restarts >= GATEWAYS and clients.sent >= REQUESTS:
                    break
                await gateway.restart()
                restarts += 1
        finally:
            clients.enough.set()
            await asyncio.gather(*asking)
            await asyncio.gather(*(gateway.kill() for gateway in gateways))
            await pod.stop()
    print(f"{clients.sent} requests, {service.connections} connections, {restarts} restarts: {dict(clients.outcomes)}")
    assert clients.outcomes.keys() == {"answered"}
    assert clients.outcomes["answered"] >= REQUESTS
    # Each restart has moved connections, as there were some on each gateway.
    assert service.connections >= CLIENTS + restarts
