"""Baton's gateway beside LiteLLM's proxy, each with an engine that sends the same tokens at the same times, in one run.

Usage: gateway_bench.py [--litellm BIN] [--reasoning-parser NAME] [--rounds N] [--out FILE]. Behind Baton's gateway are
a prefill and a decode pod, the real processes over the real wire; behind LiteLLM is an OpenAI-compatible server. Their
engines only follow a script.

tokens per CPU-second: output tokens over the CPU seconds of all processes of the gateway, under `--streams` streams of
100 tokens at once, 25 tokens a second each. added latency: from a request to the first byte of its answer, under half
of the streams that the gateway could keep at that pace, less the median of the same load on the engine itself; the 99th
percentile contains delays of the engine and the client too. memory per stream: how much the memory that only the
gateway's processes use (USS) grows with each of 1,000 open streams.

LiteLLM runs as its documentation recommends for production: one worker of uvicorn, LITELLM_MODE=PRODUCTION,
LITELLM_LOG=ERROR, a master key, no database, no Redis, no callbacks. Its connections to one host are raised to what the
load needs. Baton's gateway runs with its defaults and an API key, but lets no decode pod prefill, so that all requests
are handed over. With --reasoning-parser a second gateway of Baton reads answers that are all thoughts.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import psutil

import baton_demo
from baton_cli.ports import free_loopback_ports
from loadtest.common.bench_table import aligned, figure
from loadtest.common.job import Json
from loadtest.common.servers import HOST, Running
from loadtest.gateway.steady_load import Answer, SteadyLoad, over_grpc, over_http

MODEL = Path(baton_demo.__file__).parent / "model"
KEY = "sk-benchmark"
FIRST_S, STEP_S, TOKENS = 0.05, 0.04, 100
# A step longer than it takes, so that a stream is over before the next request of its client is due.
STREAM_S = FIRST_S + STEP_S * (TOKENS + 1)
# Streams that stay open and carry almost no tokens, to measure their memory.
IDLE_STEP_S = 5.0
_SETTLE_S = 8.0  # until the last of these streams has begun
# What begins a model's thoughts, by the gateway's --reasoning-parser.
OPENINGS = {"think": "<think>", "harmony": "<|channel|>analysis<|message|>"}
GOALS = {"ratio": 10.0, "added_p50_ms": 3.0, "added_p99_ms": 15.0, "stream_kb": 100.0}

Drive = Callable[[SteadyLoad], list[Answer]]


@dataclass(frozen=True)
class Size:
    """The sizes of all measurements of a run."""

    streams: int
    open_streams: int
    opened_per_s: float
    window_s: float
    rounds: int


@dataclass(frozen=True)
class Way:
    """A running gateway with its engine: how to put a load on each of them, and the gateway's root process."""

    gateway: Drive
    engine: Drive
    pid: int


class Logs:
    """The log files of the processes, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def scripted(script: str, step_s: float, port: int, *more: str) -> list[str]:
    folder = Path(__file__).parent
    flags = {"--model": MODEL, "--port": port, "--first-s": FIRST_S, "--step-s": step_s}
    return [sys.executable, str(folder / script), *more, *(str(word) for pair in flags.items() for word in pair)]


@contextmanager
def baton(step_s: float, logs: Logs, reasoning_parser: str = "none") -> Iterator[Way]:
    prefill, decode, port = free_loopback_ports(3)
    command = [sys.executable, "-m", "baton_cli", "gateway", "--model", str(MODEL), "--served-model-name", "scripted"]
    command += ["--host", HOST, "--port", str(port), "--admin-port", "0", "--api-keys", KEY, "--no-local-prefill"]
    command += ["--reasoning-parser", reasoning_parser]
    command += ["--prefill-addresses", f"{HOST}:{prefill}", "--decode-addresses", f"{HOST}:{decode}"]
    with ExitStack() as stack:
        for role, at in (("prefill", prefill), ("decode", decode)):
            pod = scripted("scripted_pod.py", step_s, at, role, "--opening", OPENINGS.get(reasoning_parser, ""))
            stack.enter_context(Running(pod, at, None, logs(f"{role}-{reasoning_parser}"), dict(os.environ)))
        log = logs(f"baton-{reasoning_parser}")
        gateway = stack.enter_context(Running(command, port, "/ready", log, dict(os.environ)))
        yield Way(
            partial(over_http, port, key=KEY),
            partial(over_grpc, f"{HOST}:{decode}", f"{HOST}:{prefill}"),
            gateway.pid,
        )


@contextmanager
def litellm(binary: Path, connections: int, step_s: float, logs: Logs) -> Iterator[Way]:
    upstream, port = free_loopback_ports(2)
    config = logs("litellm").with_suffix(".yaml")
    model = {"model": "openai/scripted", "api_base": f"http://{HOST}:{upstream}/v1", "api_key": "none"}
    # YAML is a superset of JSON.
    config.write_text(
        json.dumps(
            {
                "model_list": [{"model_name": "scripted", "litellm_params": model}],
                "general_settings": {"master_key": KEY},
                "litellm_settings": {"set_verbose": False, "request_timeout": 600, "telemetry": False},
            }
        )
    )
    environment = {
        **os.environ,
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOG": "ERROR",
        # Without this setting LiteLLM fetches prices over the network when it starts.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "AIOHTTP_CONNECTOR_LIMIT": str(connections),
        "AIOHTTP_CONNECTOR_LIMIT_PER_HOST": str(connections),
    }
    command = [str(binary), "--config", str(config), "--host", HOST, "--port", str(port), "--num_workers", "1"]
    with (
        Running(scripted("scripted_upstream.py", step_s, upstream), upstream, "/", logs("upstream"), dict(os.environ)),
        Running(command, port, "/health/readiness", logs("litellm"), environment) as gateway,
    ):
        yield Way(partial(over_http, port, key=KEY), partial(over_http, upstream, key=KEY), gateway.pid)


class Bench:
    """The whole run."""

    def __init__(self, size: Size, ways: dict[str, Callable[[float, Logs], Any]], logs: Logs) -> None:
        self._size = size
        self._ways = ways
        self._logs = logs
        self._client = ProcessPoolExecutor(1, get_context("spawn"))
        self._began = time.monotonic()
        # The start of the load process then does not count in the first load's time.
        self._client.submit(os.getpid).result()

    def close(self) -> None:
        self._client.shutdown()

    def run(self) -> dict[str, Json]:
        """Return the medians of all rounds and the rounds themselves, by gateway."""
        rounds: dict[str, list[Json]] = {name: [] for name in self._ways}
        with ExitStack() as stack:
            running = {name: stack.enter_context(start(STEP_S, self._logs)) for name, start in self._ways.items()}
            for way in running.values():
                # Warm-up: imports and allocations at the first use are not part of steady operation.
                self._drive(way.gateway, self._load(self._size.streams // 4, 0.0))
            # The gateways take turns, so that other work on the machine affects them equally.
            for number in range(self._size.rounds):
                for name, way in running.items():
                    rounds[name].append(self._round(way))
                    self._say(f"{name}, round {number + 1}: {json.dumps(rounds[name][-1])}")
        results = {name: {**_medians(rows), "rounds": rows} for name, rows in rounds.items()}
        for name, start in self._ways.items():
            with start(IDLE_STEP_S, self._logs) as way:
                memory = self._memory(way)
            results[name] |= memory
            self._say(f"{name}, open streams: {json.dumps(memory)}")
        return results

    def _round(self, way: Way) -> Json:
        full = self._throughput(way)
        kept = min(full["tok_s"] * STREAM_S / TOKENS, self._size.streams)
        return full | self._latency(way, max(round(kept / 2), 1))

    def _load(self, streams: int, window_s: float) -> SteadyLoad:
        start = time.perf_counter() + 0.2
        return SteadyLoad(streams, TOKENS, start, start + 1.25 * STREAM_S + window_s, STREAM_S)

    def _throughput(self, way: Way) -> Json:
        load = self._load(self._size.streams, self._size.window_s)
        answers = self._client.submit(way.gateway, load)
        began, ended = load.end - self._size.window_s, load.end - 0.1
        _sleep_until(began)
        before = _cpu_seconds(way.pid)
        began = time.perf_counter()
        _sleep_until(ended)
        cpu_s = _cpu_seconds(way.pid) - before
        ended = time.perf_counter()
        whole = _good(answers.result())
        per_event = sum(a.tokens for a in whole) / sum(len(a.events) for a in whole)
        events = sum(began <= event < ended for answer in answers.result() for event in answer.events)
        tokens = events * per_event
        return {
            "tok_per_cpu_s": tokens / cpu_s,
            "tok_s": tokens / (ended - began),
            "cpu": cpu_s / (ended - began),
            "tok_per_event": per_event,
        }

    def _latency(self, way: Way, streams: int) -> Json:
        own, through = (
            _first_bytes(self._drive(drive, self._load(streams, self._size.window_s)))
            for drive in (way.engine, way.gateway)
        )
        return {
            "half_streams": streams,
            "engine_p50_ms": own[0],
            "engine_late_p99_ms": own[1] - own[0],
            "added_p50_ms": through[0] - own[0],
            "added_p99_ms": through[1] - own[0],
        }

    def _memory(self, way: Way) -> Json:
        """Return the KB that an open stream takes, and which part of the streams has begun."""
        warm = self._load(self._size.streams, 0.0)
        self._drive(way.gateway, SteadyLoad(warm.streams, 2, warm.start, warm.end + IDLE_STEP_S, warm.period_s))
        time.sleep(1.0)
        idle = _bytes(way.pid)
        ramp_s = self._size.open_streams / self._size.opened_per_s
        start = time.perf_counter() + 0.2
        settled = start + ramp_s + _SETTLE_S
        load = SteadyLoad(self._size.open_streams, TOKENS, start, settled + 2.0, ramp_s)
        asked = self._client.submit(way.gateway, load)
        _sleep_until(settled)
        held = _bytes(way.pid) - idle
        answers = asked.result()
        error = next((answer.error for answer in answers if answer.error), "")
        if error:
            raise RuntimeError(error)
        begun = sum(bool(answer.events) for answer in answers)
        # Every requested stream is open on the gateway, even if the gateway did not answer in time.
        return {"stream_kb": held / len(answers) / 1e3, "begun": begun / len(answers)}

    def _drive(self, drive: Drive, load: SteadyLoad) -> list[Answer]:
        return self._client.submit(drive, load).result()

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


def _medians(rows: list[Json]) -> Json:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def _sleep_until(due: float) -> None:
    time.sleep(max(due - time.perf_counter(), 0.0))


def _good(answers: list[Answer]) -> list[Answer]:
    """Return the answers that are complete. Raises RuntimeError when one failed or there is none."""
    for answer in answers:
        if answer.error:
            raise RuntimeError(answer.error)
    whole = [answer for answer in answers if answer.tokens == TOKENS]
    if not whole:
        raise RuntimeError("no answer was complete in time")
    return whole


def _first_bytes(answers: list[Answer]) -> tuple[float, float]:
    """Return the median and the 99th percentile, in ms, without those before the load was steady."""
    _good(answers)
    steady = answers[0].due + STREAM_S
    times = sorted(a.events[0] - a.due for a in answers if a.due >= steady and a.events)
    return 1e3 * statistics.median(times), 1e3 * times[len(times) * 99 // 100]


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _cpu_seconds(pid: int) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in _tree(pid)))


def _bytes(pid: int) -> int:
    return sum(process.memory_full_info().uss for process in _tree(pid))


def table(results: dict[str, Json]) -> str:
    """Return a line for each figure, with its goal and, where there are two gateways, how many times better ours is."""
    ours, other = results["baton"], results.get("litellm")
    lines = [["", "goal", *results, "ratio"]]
    for title, key, goal in (
        ("output tokens per CPU-second", "tok_per_cpu_s", f">= {GOALS['ratio']:g} x"),
        ("output tokens a second", "tok_s", ""),
        ("tokens per event", "tok_per_event", ""),
        ("streams at half load", "half_streams", ""),
        ("added latency to first byte, p50, ms", "added_p50_ms", f"<= {GOALS['added_p50_ms']:g}"),
        ("added latency to first byte, p99, ms", "added_p99_ms", f"<= {GOALS['added_p99_ms']:g}"),
        ("of which engine and client alone, p99, ms", "engine_late_p99_ms", ""),
        ("memory per open stream, KB", "stream_kb", f"<= {GOALS['stream_kb']:g}"),
    ):
        ratio = ""
        if other is not None and goal:
            better = ours[key] / other[key] if key == "tok_per_cpu_s" else other[key] / ours[key]
            ratio = f"{better:.1f} x"
        lines.append([title, goal, *(figure(result[key]) for result in results.values()), ratio])
    return aligned(lines, 1)


def versions(binary: Path | None) -> Json:
    names = ("grpcio", "uvicorn", "uvloop", "httptools", "fastapi", "msgspec", "protobuf")
    found: Json = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}
    if binary is not None:
        code = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in %r}))"
        theirs = ("litellm", "uvicorn", "uvloop", "fastapi", "aiohttp", "openai")
        command = [str(binary.parent / "python"), "-c", code % (theirs,)]
        found["litellm"] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", type=Path, help="LiteLLM's command; without it only Baton is measured")
    parser.add_argument(
        "--reasoning-parser", choices=OPENINGS, help="also measure a gateway that takes all answers for thoughts"
    )
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--open-streams", type=int, default=1000)
    parser.add_argument(
        "--opened-per-s", type=float, default=40.0, help="how many of the open streams start each second"
    )
    parser.add_argument("--window-s", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    size = Size(args.streams, args.open_streams, args.opened_per_s, args.window_s, args.rounds)
    ways: dict[str, Callable[[float, Logs], Any]] = {"baton": baton}
    if args.reasoning_parser is not None:
        ways["with thoughts"] = partial(baton, reasoning_parser=args.reasoning_parser)
    if args.litellm is not None:
        ways["litellm"] = partial(litellm, args.litellm, 2 * max(args.streams, args.open_streams))
    found = versions(args.litellm)
    print(json.dumps(found), flush=True)
    # gRPC logs each lost connection to stderr, and the connections to the pods are lost at the end.
    os.environ["GRPC_VERBOSITY"] = "NONE"
    with (
        tempfile.TemporaryDirectory(prefix="baton-gateway-bench-") as folder,
        closing(Bench(size, ways, Logs(Path(folder)))) as bench,
    ):
        results = bench.run()
    print(f"\n{table(results)}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"versions": found, "goals": GOALS, "results": results}, indent=1))


if __name__ == "__main__":
    main()
