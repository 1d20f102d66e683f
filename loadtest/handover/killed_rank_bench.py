"""How long a stream stands still when a rank of its decode pod is killed: from the kill to the first resumed token.

Usage: killed_rank_bench.py [MODEL_DIR] [--kills N] [--tokens N] [--out FILE]. `baton up --aggregated` runs two decode
pods of two ranks each, by default of the demo model. Each round streams one greedy answer, kills the second rank of the
pod that serves it after some tokens, and waits until the pod has been started again. The tokens must be those of an
answer that nothing disturbed.
"""

import argparse
import http.client
import itertools
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import psutil

from baton_cli.ports import free_loopback_ports
from baton_demo import MODEL_DIR
from loadtest.common.job import Json
from loadtest.common.servers import HOST, Server

PROMPT = list(range(20, 84))
_PODS = 2
_READY_S = 120.0
_KILLS_OF_A_STACK = 5  # `baton up` waits longer before each restart of the same pod
_RANK = "baton_engine.ranks.process"


class Stack:
    """A local Baton whose decode pods have two ranks."""

    def __init__(self, server: Server, admin_port: int) -> None:
        self._server, self._admin = server, f"http://{HOST}:{admin_port}"

    def pods(self) -> list[Json]:
        """Return the gateway's view of the live decode pods."""
        with urllib.request.urlopen(f"{self._admin}/pods", timeout=5) as response:
            return [pod for pod in json.load(response)["pods"] if pod["role"] == "decode" and pod["live"]]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while len(self.pods()) < _PODS:
            if time.monotonic() > deadline:
                raise RuntimeError(f"fewer than {_PODS} decode pods are live after {_READY_S:g} s")
            time.sleep(0.2)

    def serving_rank(self) -> psutil.Process:
        """Return the second rank of the only pod that has a request."""
        [address] = [pod["address"] for pod in self.pods() if pod["requests"]]
        port = address.rsplit(":", 1)[1]
        for pod in psutil.Process(self._server.pid).children():
            if port in pod.cmdline():
                return next(child for child in pod.children(recursive=True) if _RANK in child.cmdline())
        raise RuntimeError(f"no process listens on {address}")

    def stream(self, tokens: int) -> Iterator[tuple[float, int]]:
        """Yield each token of an answer with the time at which it came. Raises RuntimeError when the stream fails."""
        body = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection(HOST, self._server.port, timeout=_READY_S)
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True, "return_token_ids": True}))
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                arrived = time.perf_counter()
                yield from ((arrived, token) for choice in event["choices"] for token in choice.get("token_ids", ()))
        connection.close()


def kill_once(stack: Stack, tokens: int) -> tuple[float, list[int]]:
    """Kill a rank in the middle of an answer. Return the seconds until the answer went on, and its tokens."""
    killed, found = 0.0, []
    for arrived, token in stack.stream(tokens):
        found.append((arrived, token))
        if len(found) == tokens // 4:
            rank = stack.serving_rank()
            killed = time.perf_counter()
            rank.kill()
    return pause(killed, [arrived for arrived, _ in found]), [token for _, token in found]


def pause(killed: float, arrivals: list[float]) -> float:
    """Return the seconds from the kill to the first token of the other pod.

    Tokens that were on their way when the rank was killed come at once; that token comes after the longest pause.
    """
    times = [killed, *(arrived for arrived in arrivals if arrived > killed)]
    return max((later - earlier, later) for earlier, later in itertools.pairwise(times))[1] - killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL_DIR)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer; a rank is killed after a quarter")
    parser.add_argument("--out", type=Path, default=Path("loadtest/out/killed_rank.json"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    [admin_port] = free_loopback_ports(1)
    settings = {"decode": _PODS, "tensor_parallel": 2, "admin_port": admin_port}
    seconds: list[float] = []
    while len(seconds) < arguments.kills:
        with Server("ours", arguments.model, settings, arguments.out.with_suffix(".log")) as server:
            stack = Stack(server, admin_port)
            stack.wait_until_ready()
            expected = [token for _, token in stack.stream(arguments.tokens)]
            for _ in range(min(_KILLS_OF_A_STACK, arguments.kills - len(seconds))):
                stack.wait_until_ready()
                paused, found = kill_once(stack, arguments.tokens)
                if found != expected:
                    raise SystemExit(f"{found} instead of {expected}")
                seconds.append(paused)
                print(f"kill {len(seconds)}: {paused:.2f} s", flush=True)
    print(
        f"{len(seconds)} kills: p50 {statistics.median(seconds):.2f} s, max {max(seconds):.2f} s, all tokens as before"
    )
    arguments.out.write_text(json.dumps({"seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
