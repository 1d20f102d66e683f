"""A gateway under test: real HTTP in front, real gRPC to scripted pods behind, all in one event loop."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from baton_gateway.fleet.catalog import load_catalog
from baton_gateway.fleet.fleet import Fleet
from baton_gateway.gateway import Gateway
from baton_gateway.models.model import ServedModel
from baton_gateway.settings import GatewaySettings
from baton_gateway.web.app import create_app
from baton_gateway.web.certificate import Certificate
from baton_gateway.web.server import GatewayServer, ServerConfig, listen
from baton_proto import serving_pb2 as pb

from .fake_worker import FakePod


@dataclass
class Stack:
    """A running gateway and its pods."""

    gateway: Gateway
    server: GatewayServer
    decodes: list[FakePod]
    prefills: list[FakePod]
    port: int
    admin_port: int
    http: httpx.AsyncClient

    @property
    def pod(self) -> FakePod:
        return self.decodes[0]

    @property
    def model(self) -> ServedModel:
        """The first, or only, one."""
        return next(iter(self.gateway.catalog)).served

    @property
    def fleet(self) -> Fleet:
        """Of the only pool."""
        [(_, pool)] = self.gateway.catalog.pools
        return pool.fleet

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ids(self, text: str) -> list[int]:
        return self.model.tokenizer.encode_now(text, add_special_tokens=False)

    def prompt(self, number: int = 0) -> str:
        """Return the text of the pod's prompt of that number."""
        return self.model.tokenizer.decode(self.pod.jobs[number].prompt, skip_special_tokens=False)

    async def admin(self, path: str) -> httpx.Response:
        return await self.http.get(f"http://127.0.0.1:{self.admin_port}{path}")

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def sync_client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **fields})

    async def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields})

    async def respond(self, input: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/responses", json={"model": "tiny", "input": input, **fields})

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for something only the gateway's own state tells."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    model: Path | None,
    decodes: Sequence[FakePod],
    prefills: Sequence[FakePod] = (),
    *,
    wait: bool = True,
    certificate: Certificate | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """Run a gateway for these pods, which must have started.

    model: None when the settings have a `models_file`. wait: until the gateway has found every one.
    """
    served: dict[str, Any] = {
        "model": model,
        "served_model_name": "tiny",
        "decode_addresses": [pod.address for pod in decodes],
        "prefill_addresses": [pod.address for pod in prefills],
    }
    gateway_settings = GatewaySettings(
        **({} if "models_file" in settings else served), **{"resume_timeout_s": 0.1, "pod_wait_s": 0.1, **settings}
    )
    gateway = Gateway(gateway_settings, load_catalog(gateway_settings))
    listener, admin = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    port, admin_port = listener.getsockname()[1], admin.getsockname()[1]
    server = GatewayServer(
        gateway.services,
        ServerConfig(gateway.services, create_app(gateway.services, gateway.running), certificate),
        admin,
    )
    task = asyncio.create_task(server.serve([listener]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
        stack = Stack(gateway, server, list(decodes), list(prefills), port, admin_port, http)
        try:
            routers = [pool.fleet.router for _, pool in gateway.catalog.pools]
            found = [pod for router in routers for pod in (*router.decodes, *router.prefills)]
            await stack.until(lambda: server.started)
            await stack.until(lambda: not wait or all(pod.live for pod in found))
            yield stack
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def pods(count: int = 1, role: pb.Role = pb.ROLE_DECODE, **options: Any) -> AsyncIterator[list[FakePod]]:
    started = [await FakePod(role, **options).start() for _ in range(count)]
    try:
        yield started
    finally:
        for pod in started:
            await pod.stop()


def raw_connection(port: int) -> socket.socket:
    """Open a plain connection, for what no HTTP client would send."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.settimeout(10)
    return connection


def events(response: httpx.Response) -> list[Any]:
    """Return the JSON of a stream's events; it must end by [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def response_events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream of /v1/responses, which are numbered and named twice; keepalives are left out."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    read = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(read)
        read.append(event)
    return read


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response, which must have the one form there is."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    return dict(body["error"])
