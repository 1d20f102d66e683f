"""A whole local Baton, as `baton up` starts it."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from baton_cli.ports import free_loopback_ports

from .pod import Pod
from .process import Process

MODEL_NAME = "model"
STEP_TOKENS = 32
READY_S = 60


class Stack:
    """Gateway, prefill and decode processes, and an HTTP client for them."""

    def __init__(self, process: Process, port: int, admin_port: int, model: str, api_key: str | None) -> None:
        self.process = process
        self.port = port
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self.model = model
        self.api_key = api_key
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60, limits=httpx.Limits())

    @classmethod
    async def start(
        cls, folder: Path | None, *flags: str, api_key: str | None = None, env: dict[str, str] | None = None
    ) -> "Stack":
        """Run `baton up` on a free port until it is ready. folder: of the model; None = the demo model."""
        port, admin_port = free_loopback_ports(2)
        args = ["up", "--port", str(port), "--admin-port", str(admin_port), "--served-model-name", MODEL_NAME, *flags]
        args += ["--model", str(folder)] if folder else []
        args += ["--api-key", api_key] if api_key else []
        process = await Process.start(*args, env=env)
        try:
            await process.wrote(lambda line: "Baton is ready" in line["message"], READY_S)
        except BaseException:
            await process.kill()
            raise
        return cls(process, port, admin_port, MODEL_NAME, api_key)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metrics_addresses(self, role: str) -> list[str]:
        """Return where each process of a role is asked for its metrics: gateway, prefill or decode."""
        flag = "--admin-port" if role == "gateway" else "--metrics-port"
        return [f"127.0.0.1:{_argument_after(process.cmdline(), flag)}" for process in self.processes(role)]

    def processes(self, role: str) -> list[psutil.Process]:
        """Return the processes of a role that run now: gateway, prefill or decode."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie, which is one of its kinds
                found += [child] if _argument_after(child.cmdline(), "baton_cli") == role else []
        return found

    def all_processes(self) -> dict[str, psutil.Process]:
        """Return every process below `baton up`, by a name that tells it from the others."""
        named: dict[str, psutil.Process] = {}
        for role in ("gateway", "decode", "prefill"):
            for index, process in enumerate(self.processes(role)):
                named[f"{role}-{index}"] = process
                named.update((f"{role}-{index}-engine", child) for child in process.children())
        return named

    def pods(self, role: str | None = None) -> list[Pod]:
        """Return the worker pods."""
        processes = [process for r in ([role] if role else ["decode", "prefill"]) for process in self.processes(r)]
        return [Pod(f"127.0.0.1:{_argument_after(process.cmdline(), '--port')}") for process in processes]

    async def idle(self) -> None:
        """Wait until nothing is held anywhere."""
        await asyncio.gather(*(pod.idle() for pod in self.pods()))
        async with asyncio.timeout(10):
            while await self.metric("baton_gateway_requests_in_flight"):
                await asyncio.sleep(0.05)

    async def metric(self, name: str) -> float:
        """Return the value of a metric of the gateway that has no labels."""
        lines = (await self.http.get(f"{self.admin_url}/metrics")).text.splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

    async def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": self.model, "prompt": prompt, **fields})

    async def tokens(self, prompt: list[int], max_tokens: int, **fields: Any) -> list[list[int]]:
        """Complete a prompt greedily past any end token; return the tokens of each choice."""
        fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": max_tokens, **fields}
        response = await self.complete(prompt, **fields)
        assert response.status_code == 200, response.text
        return [choice["token_ids"] for choice in response.json()["choices"]]

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**{**self._client_options(), **options})

    def sync_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{**self._client_options(), **options})

    async def stop(self) -> None:
        await self.http.aclose()
        await self.process.kill()

    def _client_options(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": self.api_key or "none", "max_retries": 0}


def _argument_after(command: list[str], word: str) -> str:
    return command[command.index(word) + 1] if word in command else ""
