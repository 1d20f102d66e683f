"""Settings from flags and environment, and how the process starts and ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from baton_gateway.models.models_file import ModelsFileError
from baton_gateway.settings import GatewaySettings

from .harness import pods

ROOT = Path(__file__).parents[2]
START = """
from pydantic_settings import CliApp
from baton_gateway.main import main
from baton_gateway.settings import GatewaySettings

class Command(GatewaySettings):
    def cli_cmd(self) -> None:
        main(self)

CliApp.run(Command)
"""


class Parsed(GatewaySettings):
    def cli_cmd(self) -> None:
        pass


def parse(*flags: str) -> GatewaySettings:
    return CliApp.run(Parsed, cli_args=list(flags))


def test_flags(tmp_path):
    settings = parse(
        *("--model", str(tmp_path), "--port", "9", "--served-model-name", "m", "--no-use-generation-config"),
        *("--decode-addresses", "a:1,b:2", "--prefill-addresses", "c:3", "--api-keys", "one,two"),
    )
    assert settings.decode_addresses == ["a:1", "b:2"]
    assert settings.prefill_addresses == ["c:3"]
    assert [key.get_secret_value() for key in settings.api_keys] == ["one", "two"]
    assert (settings.port, settings.served_model_name, settings.use_generation_config) == (9, "m", False)


def test_environment(tmp_path, monkeypatch):
    for name, value in {"MODEL": str(tmp_path), "DECODE_ADDRESSES": "a:1, b:2,", "API_KEYS": "k"}.items():
        monkeypatch.setenv(f"BATON_{name}", value)
    settings = GatewaySettings()
    assert settings.decode_addresses == ["a:1", "b:2"]
    assert settings.prefill_addresses == []
    assert settings.model_specs()[0].name == tmp_path.name
    assert "k" not in repr(settings.api_keys)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"decode_addresses": ""}, "at least one decode pod"),
        ({"decode_addresses": "nowhere"}, "not host:port"),
        ({"port": 70000}, "less than or equal"),
        ({"api_keys": [""]}, "a key is empty"),
    ],
)
def test_wrong_settings(tmp_path, change, complaint):
    with pytest.raises(ValidationError, match=complaint):
        GatewaySettings(**{"model": tmp_path, "decode_addresses": "a:1", **change})


def test_a_model_that_is_no_folder():
    settings = GatewaySettings(model=Path("/does/not/exist"), decode_addresses=["a:1"])
    with pytest.raises(ModelsFileError, match="/does/not/exist is not a folder"):
        settings.model_specs()


def test_every_setting_is_described():
    assert all(field.description for field in GatewaySettings.model_fields.values())


def start(*flags: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(str(ROOT / part) for part in ("services", "shared", "kernels"))
    return subprocess.Popen(
        [sys.executable, "-c", START, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.processes
def test_a_taken_port_is_one_line_and_a_failure(model_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(
            *("--model", str(model_folder), "--host", "127.0.0.1"),
            *("--port", str(port), "--admin-port", "0", "--decode-addresses", "127.0.0.1:1"),
        )
        _, output = process.communicate(timeout=30)
    lines = [json.loads(line) for line in output.splitlines()]
    assert process.returncode == 1
    assert len(lines) == 1
    assert str(port) in lines[0]["message"]
    assert lines[0]["level"] == "error"


@pytest.mark.processes
async def test_a_process_serves_and_ends_in_order(model_folder):
    async with pods() as (pod,):
        process = start(
            *("--model", str(model_folder), "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"),
            *("--decode-addresses", pod.address, "--served-model-name", "tiny"),
        )
        try:
            log = await lines_until(process, "ready")
            port = next(entry["port"] for entry in log if entry.get("event") == "listening")
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "secret words"})
            assert answer.json()["choices"][0]["text"] == "secret words"
            process.send_signal(signal.SIGTERM)
            rest = await asyncio.to_thread(process.stderr.read)
            assert await asyncio.to_thread(process.wait, 10) == 0
        finally:
            process.kill()
    log += [json.loads(line) for line in rest.splitlines()]
    assert sum(entry.get("event") == "ready" for entry in log) == 1
    [request] = [entry for entry in log if entry["message"] == "request"]
    assert request["request_id"] == answer.headers["x-request-id"]
    assert (request["status"], request["route"]) == (200, "/v1/completions")
    assert request["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert "secret" not in json.dumps(log)


async def lines_until(process: subprocess.Popen[str], event: str) -> list[dict[str, object]]:
    """Read log lines up to the one with this event."""
    lines: list[dict[str, object]] = []
    while not lines or lines[-1].get("event") != event:
        line = await asyncio.to_thread(process.stderr.readline)
        assert line, f"the process ended before {event!r}: {lines}"
        lines.append(json.loads(line))
    return lines


@pytest.mark.processes
def test_the_gateway_imports_no_engine():
    code = "import sys, baton_gateway.main; print(sorted({name.split('.')[0] for name in sys.modules}))"
    paths = os.pathsep.join(str(ROOT / part) for part in ("services", "shared", "kernels"))
    environment = {**os.environ, "PYTHONPATH": paths}
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert "baton_gateway" in output
    for name in ("torch", "transformers", "numpy", "baton_engine", "baton_kv", "baton_worker"):
        assert f"'{name}'" not in output
