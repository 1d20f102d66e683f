"""`baton up` with its real command line and stand-ins for the services, which record how they were called."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton_demo import MODEL_DIR

SETTINGS = """
from pydantic_settings import BaseSettings, SettingsConfigDict

class {name}(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="BATON_")
    model: str
    served_model_name: str
    host: str
    port: int
    admin_host: str = ""
    admin_port: int = 0
    metrics_port: int = 0
    decode_addresses: str = ""
    prefill_addresses: str = ""
    shutdown_grace_s: int = 60
    api_keys: str = ""
    dtype: str = ""
    kv_cache_dtype: str = ""
    block_size: int = 16
    num_blocks: int = 0
    gpu_memory_utilization: float = 0
    gpu_pair_memory: float = 0
    engines_sharing_cpu: int = 0
    max_num_seqs: int = 0
    max_model_len: int = 0
    max_num_batched_tokens: int = 0
    enable_prefix_caching: bool = True
    log_level: str = ""
"""

WORKER = """
import json, os, signal, sys

def main(settings):
    with open(os.environ["RECORD"], "a") as stream:
        stream.write(json.dumps([*sys.argv[1:], settings.api_keys]) + "\\n")
    print(json.dumps({"level": "info", "message": "up", "event": "ready"}), file=sys.stderr)
    signal.pause()
"""

GATEWAY = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        # As the real one: not ready before all workers are.
        with open(os.environ["RECORD"]) as stream:
            started = {line.split('"')[1] + line.split('"--port", "')[1].split('"')[0] for line in stream}
        self.send_response(200 if self.path == "/ready" and len(started) > self.workers else 404)
        self.end_headers()

def main(settings):
    addresses = f"{settings.decode_addresses},{settings.prefill_addresses}".split(",")
    Handler.workers = len([address for address in addresses if address])
    with open(os.environ["RECORD"], "a") as stream:
        stream.write(json.dumps([*sys.argv[1:], settings.api_keys]) + "\\n")
    HTTPServer((settings.host, settings.port), Handler).serve_forever()
"""

SHARING = ("--engines-sharing-cpu", "2")  # what a prefill and a decode worker do

pytestmark = pytest.mark.processes


class Up:
    """`baton up` started with stand-ins."""

    def __init__(self, folder: Path, start) -> None:
        for package, name, main in (
            ("baton_gateway", "GatewaySettings", GATEWAY),
            ("baton_prefill", "PrefillSettings", WORKER),
            ("baton_decode", "DecodeSettings", WORKER),
        ):
            (folder / package).mkdir()
            (folder / package / "__init__.py").touch()
            (folder / package / "settings.py").write_text(SETTINGS.format(name=name))
            (folder / package / "main.py").write_text(main)
        self.record = folder / "record"
        self._env = {"PYTHONPATH": str(folder), "RECORD": str(self.record)}
        self._start = start

    def __call__(self, *flags: str, **env: str):
        return self._start(sys.executable, "-m", "baton_cli", "up", *flags, **self._env, **env)

    def calls(self, service: str) -> list[list[str]]:
        """The flags of each start of a service so far. The API keys follow as the last item."""
        calls = [json.loads(line) for line in self.record.read_text().splitlines()]
        return [flags for name, *flags in calls if name == service]


@pytest.fixture
def up(tmp_path: Path, start) -> Up:
    return Up(tmp_path, start)


def port_of(flags: list[str], flag: str = "--port") -> str:
    return flags[flags.index(flag) + 1]


def curl_of(text: str) -> list[str]:
    """The curl command that is printed for copying, split as a shell does."""
    begin = text.index("curl ")
    command = text[begin : text.index("\n\n", begin)]
    return subprocess.check_output(["sh", "-c", f"printf '%s\\0' {command}"], text=True).split("\0")[:-1]


def test_runs_one_of_each_and_says_how_to_talk_to_it(up: Up, free_port: int) -> None:
    running = up("--port", str(free_port))
    running.when("Ctrl-C stops it")

    (decode,), (prefill,), (gateway,) = up.calls("decode"), up.calls("prefill"), up.calls("gateway")
    model = ["--model", str(MODEL_DIR), "--served-model-name", "baton-demo", "--host", "127.0.0.1"]
    # Both workers share one GPU, if there is one, and the same cores.
    share = ["--gpu-memory-utilization", "0.46", "--gpu-pair-memory", "0", *SHARING]
    for worker in (decode, prefill):
        ports = ["--port", port_of(worker), "--metrics-port", port_of(worker, "--metrics-port")]
        assert worker == [*model, *ports, *share, ""]
    assert gateway == [
        *model,
        *("--port", str(free_port)),
        *("--shutdown-grace-s", "6"),
        *("--admin-host", "127.0.0.1", "--admin-port", port_of(gateway, "--admin-port")),
        *("--decode-addresses", f"127.0.0.1:{port_of(decode)}"),
        *("--prefill-addresses", f"127.0.0.1:{port_of(prefill)}"),
        "",
    ]

    url = f"http://127.0.0.1:{free_port}"
    assert f"Baton is ready at {url}." in running.text
    ports = [port_of(gateway, "--admin-port"), *(port_of(worker, "--metrics-port") for worker in (prefill, decode))]
    urls = " ".join(f"http://127.0.0.1:{port}/metrics" for port in ports)
    assert f"Metrics: {urls}\n" in running.text
    assert len({*ports, port_of(prefill), port_of(decode)}) == 5
    curl = curl_of(running.text)
    assert curl[:4] == ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    assert curl[4] == "-d"
    assert len(curl) == 6
    assert json.loads(curl[5]) == {
        "model": "baton-demo",
        "messages": [{"role": "user", "content": "What is Baton?"}],
    }

    running.interrupt()
    assert running.wait() == 0


def test_passes_given_flags_to_the_workers_and_no_others(up: Up, free_port: int, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    given = ["--dtype", "float32", "--kv-cache-dtype", "fp8", "--block-size", "32", "--num-blocks", "9"]
    given += ["--gpu-memory-utilization", "0.3", "--max-model-len", "64"]
    given += ["--max-num-batched-tokens", "128", "--max-num-seqs", "7", "--no-enable-prefix-caching"]
    running = up("--model", str(folder), "--port", str(free_port), "--log-level", "debug", *given)
    running.when("Ctrl-C stops it")
    # All workers share one GPU, so no two of them can form a pair of GPUs.
    at = given.index("--max-model-len")
    given[at:at] = ["--gpu-pair-memory", "0"]
    for service in ("decode", "prefill"):
        (flags,) = up.calls(service)
        assert flags[:4] == ["--model", str(folder), "--served-model-name", "my-model"]
        assert flags[flags.index("--metrics-port") + 2 : -1] == ["--log-level", "debug", *given, *SHARING]
    (gateway,) = up.calls("gateway")
    assert gateway[gateway.index("--port") + 2 :][:4] == ["--log-level", "debug", "--shutdown-grace-s", "6"]


def test_more_workers_have_numbers_and_ports_of_their_own(up: Up, free_port: int) -> None:
    running = up("--port", str(free_port), "--prefill", "2", "--decode", "3", "--served-model-name", "it's")
    running.when("Ctrl-C stops it")
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"):
        running.when(f"{name:9}   ready")
    (gateway,) = up.calls("gateway")
    for service, count in (("prefill", 2), ("decode", 3)):
        addresses = gateway[gateway.index(f"--{service}-addresses") + 1].split(",")
        assert sorted(addresses) == sorted(f"127.0.0.1:{port_of(flags)}" for flags in up.calls(service))
        assert len(set(addresses)) == count
        assert {port_of(flags, "--engines-sharing-cpu") for flags in up.calls(service)} == {"5"}
    curl = curl_of(running.text)
    assert json.loads(curl[-1])["model"] == "it's"


def test_aggregated_runs_no_prefill_worker(up: Up, free_port: int) -> None:
    running = up("--port", str(free_port), "--aggregated")
    running.when("Ctrl-C stops it")
    running.when("decode    ready")
    assert up.calls("prefill") == []
    (gateway,), (decode,) = up.calls("gateway"), up.calls("decode")
    assert "--prefill-addresses" not in gateway
    assert port_of(decode, "--engines-sharing-cpu") == "1"


def test_who_shares_the_cores_may_be_said_in_the_environment(up: Up, free_port: int) -> None:
    running = up("--port", str(free_port), "--aggregated", BATON_ENGINES_SHARING_CPU="3")
    running.when("Ctrl-C stops it")
    running.when("decode    ready")
    (decode,) = up.calls("decode")
    assert "--engines-sharing-cpu" not in decode


def test_a_killed_worker_comes_back_on_the_same_port(up: Up, free_port: int) -> None:
    running = up("--port", str(free_port))
    running.when("Ctrl-C stops it")
    (worker,) = (process for process in running.children() if "decode" in process.cmdline())
    worker.kill()
    running.when("decode    ready", count=2)
    first, second = up.calls("decode")
    assert first == second


def test_keys_reach_the_gateway_alone_and_no_command_line(up: Up, free_port: int) -> None:
    running = up("--port", str(free_port), "--api-key", "sk-one", "--api-key", "sk-two")
    running.when("Ctrl-C stops it")
    running.when("prefill   ready")
    assert [flags[-1] for flags in up.calls("gateway")] == ["sk-one,sk-two"]
    assert [flags[-1] for flags in up.calls("decode") + up.calls("prefill")] == ["", ""]
    assert not any("sk-" in part for process in running.children() for part in process.cmdline())
    assert '-H "Authorization: Bearer $BATON_API_KEY"' in running.text
    assert "sk-" not in running.text


def test_a_key_may_come_from_the_environment(up: Up, free_port: int) -> None:
    running = up("--port", str(free_port), BATON_API_KEY="sk-three")
    running.when("Ctrl-C stops it")
    assert [flags[-1] for flags in up.calls("gateway")] == ["sk-three"]
    assert '-H "Authorization: Bearer $BATON_API_KEY"' in running.text


def test_log_dir_keeps_every_line_of_every_process(up: Up, free_port: int, tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    running = up("--port", str(free_port), "--log-dir", str(logs))
    running.when("Ctrl-C stops it")
    running.when("prefill   ready")
    assert {file.name for file in logs.iterdir()} == {"gateway.log", "decode.log", "prefill.log"}
    assert json.loads((logs / "prefill.log").read_text())["event"] == "ready"


def refused(up: Up, *flags: str) -> tuple[int, list[str]]:
    """Return the exit code and the output of a command that must fail before it starts a process."""
    running = up(*flags)
    code = running.wait()
    assert not up.record.exists()
    return code, running.text.splitlines()


def test_a_taken_port_is_one_clear_line(up: Up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, lines = refused(up, "--port", str(port))
    assert code == 1
    assert lines == [f"baton: port {port} on 127.0.0.1 is taken: stop what listens there, or choose another --port"]


def test_a_missing_model_is_one_clear_line(up: Up) -> None:
    code, lines = refused(up, "--model", "/no/such/folder")
    assert code == 1
    assert lines == ["baton: /no/such/folder is no model folder: it has no config.json"]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--aggregated", "--prefill", "2"], "--prefill"),
        (["--api-key", "a,b"], "--api-key"),
        (["--decode", "0"], "--decode"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_flags_that_make_no_sense_are_refused(up: Up, flags: list[str], part: str) -> None:
    code, lines = refused(up, *flags)
    assert code == 2
    assert part in lines[-1]


def test_the_supervisor_imports_no_torch() -> None:
    code = "import sys, baton_cli.main; print([name for name in ('torch', 'pydantic', 'grpc') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert result.stdout.strip() == "[]"
